"""The best of some candidates, and the reason in words. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from burst_mcore.attention.autotune.candidate import Candidate, Slower
from burst_mcore.attention.schedule.actions import Pass

AS_FAST = 1.01
"""Candidates within this factor of the fastest count as equally fast: the model is no more exact. The same
share of the time is its error for exposed communication."""


def best(costed: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate; among equally fast ones (`AS_FAST`) the first in the order of ties.

    First comes least exposed communication, as far as the model can tell. Then come fewest ranks tied
    together by an exchange across nodes, and no ring over all; then fewest bytes between nodes, and within.
    The simplest comes last.
    """
    fastest = min(candidate.seconds for candidate in costed)
    as_fast = [c for c in costed if c.seconds <= AS_FAST * fastest]
    exposed = min(c.exposed_seconds for c in as_fast) + (AS_FAST - 1) * fastest

    def order(c: Candidate) -> tuple[float, ...]:
        across, route = (c.tied, c.crosses_flat, c.inter_bytes), c.route
        return (
            *across,
            c.intra_bytes,
            route.rings,
            route.direct,
            route.heads,
            route.outer,
            _second(c),
            route.mirrored,
        )

    return min((c for c in as_fast if c.exposed_seconds <= exposed), key=order)


def _second(candidate: Candidate) -> bool:
    """Return whether the other direction is better where all else is equal.

    Ties go to "query", the paper's choice, except on a ring of one: there "kv" can start before all of dO has
    arrived.
    """
    return (candidate.direction == Pass.QUERY) == (candidate.route.positions == 1)


def reason(chosen: Candidate, costed: Sequence[Candidate], slower: Sequence[Slower] = ()) -> str:
    """Say why a candidate was chosen; slower: the ways that were not simulated."""
    if chosen.seconds == 0:
        return "nothing is to be done"
    bound = chosen.compute_seconds / chosen.seconds
    kernel_share = f"{bound:.0%} of its {chosen.seconds:.3g} s is kernel time"
    others = [c for c in costed if c is not chosen]
    if not others and slower:
        least = min(way.at_least for way in slower) / chosen.seconds
        return f"fastest: every other way takes at least {least - 1:.0%} longer; {kernel_share}"
    if not others:
        return f"the only one; {kernel_share}"
    rival = min(others, key=lambda c: c.seconds)
    ratio = rival.seconds / chosen.seconds
    if ratio > AS_FAST:
        return f"fastest: the next, {rival}, takes {ratio - 1:.0%} longer; {kernel_share}"
    if ratio >= 1:
        return f"fastest, with {rival} {ratio - 1:.2%} behind; {_saved(chosen, rival)}; {kernel_share}"
    return (
        f"as fast as {rival} ({1 / ratio - 1:.2%} slower, which the model cannot tell); "
        f"{_saved(chosen, rival)}; {kernel_share}"
    )


def _saved(chosen: Candidate, rival: Candidate) -> str:
    """Say what an equally fast candidate saves beside another, and how much."""
    saved = []
    if chosen.exposed_seconds < rival.exposed_seconds:
        less = rival.exposed_seconds - chosen.exposed_seconds
        saved.append(f"exposes {less * 1e3:.3g} ms less communication")
    if chosen.tied < rival.tied:
        saved.append(f"ties {chosen.tied} ranks together across nodes instead of {rival.tied}")
    for link, ours, theirs in (
        ("between nodes", chosen.inter_bytes, rival.inter_bytes),
        ("within nodes", chosen.intra_bytes, rival.intra_bytes),
    ):
        if ours < theirs:
            saved.append(f"moves {1 - ours / theirs:.0%} fewer bytes {link}")
    return f"it {', '.join(saved)}" if saved else "it is the simpler"
