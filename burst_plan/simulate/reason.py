"""The reason of a choice as text: its share of kernel time, and the nearest rival."""

from __future__ import annotations

from collections.abc import Sequence

from burst_mcore.attention.choose import AS_FAST, Candidate, Family

PHRASES = {
    Family.RING: "a ring",
    Family.HEADS_WITHIN: "heads within a node",
    Family.DIRECT: "a direct exchange",
    Family.HEADS_ACROSS: "heads across nodes",
}


def to_paste(c: Candidate) -> str:
    """Return the settings of `BurstConfig` for a candidate, ready to paste."""
    outer = ", head_placement='outer'" * c.route.outer
    return f"ring={c.ring!r}, head_parallel={c.route.heads}{outer}, backward={c.direction.value!r}"


def reason(chosen: Candidate, costed: Sequence[Candidate]) -> str:
    """Return the reason why a candidate was chosen."""
    if chosen.seconds == 0:
        return "nothing is to be done"
    bound = chosen.compute_seconds / chosen.seconds
    kernel_share = f"{bound:.0%} of its {chosen.seconds:.3g} s is kernel time"
    others = [c for c in costed if c is not chosen]
    if not others:
        return f"no other candidate was simulated; {kernel_share}"
    rival = min(others, key=lambda c: c.seconds)
    ratio, name = rival.seconds / chosen.seconds, _named(rival)
    if ratio * AS_FAST < 1:
        return f"the rule is {1 / ratio - 1:.0%} behind {name}, which settings reach; {kernel_share}"
    if ratio > AS_FAST:
        return f"fastest of the candidates: the next, {name}, takes {ratio - 1:.0%} longer; {kernel_share}"
    gap = f"{ratio - 1:.2%} slower" if ratio >= 1 else f"{1 / ratio - 1:.2%} faster"
    return f"tied with {name} ({gap}); chosen because {_preferred(chosen, rival)}; {kernel_share}"


def _named(c: Candidate) -> str:
    """Return a candidate in the words of its settings."""
    ring = f"{c.ring}{', mirrored' * c.route.mirrored}"
    return f"{ring}, head_parallel={c.route.heads}{' outer' * c.route.outer}, {c.direction}"


def _preferred(chosen: Candidate, rival: Candidate) -> str:
    """Return the reason why a candidate is preferred to an equally fast rival."""
    if chosen.family != rival.family:
        return f"{PHRASES[chosen.family]} is plainer than {PHRASES[rival.family]}"
    for link, size, of_rival in (
        ("between nodes", chosen.inter_bytes, rival.inter_bytes),
        ("within nodes", chosen.intra_bytes, rival.intra_bytes),
    ):
        if size < of_rival:
            return f"it moves {1 - size / of_rival:.0%} fewer bytes {link}"
        if size > of_rival:
            break
    return "it is plainer"
