"""Ways to run a call with their predicted costs, the best of them, and the reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route

AS_FAST = 1.05
"""Candidates within this factor of the fastest count as equally fast: the model's median error is 6.6 %."""


class Family(IntEnum):
    """The kinds of ways between which "auto" chooses, the plainest first: equally fast, the first wins."""

    RING = 0
    HEADS_WITHIN = 1
    DIRECT = 2
    HEADS_ACROSS = 3

    @classmethod
    def of(cls, route: Route, intra: int) -> Family:
        """Return the last word that a route needs; intra: ranks of a node."""
        if route.heads > 1 and route.size > intra and (route.outer or intra % route.heads):
            return cls.HEADS_ACROSS
        if route.direct:
            return cls.DIRECT
        return cls.HEADS_WITHIN if route.heads > 1 else cls.RING

    @property
    def phrase(self) -> str:
        return ("a ring", "heads within a node", "a direct exchange", "heads across nodes")[self]


@dataclass(frozen=True)
class Candidate:
    """A way to run a call (ring, route, backward pass), and its predicted cost."""

    ring: str
    route: Route
    direction: Pass
    forward_seconds: float
    backward_seconds: float
    """Time at which the slowest rank ends."""
    compute_seconds: float
    """Time of the kernel alone, on the busiest rank."""
    intra_bytes: int
    inter_bytes: int
    """Sent in forward and backward by a rank, on average."""
    family: Family

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        ring = f"{self.ring}{', mirrored' * self.route.mirrored}"
        return f"{ring}, head_parallel={self.route.heads}{' outer' * self.route.outer}, {self.direction}"


def best(costed: Sequence[Candidate]) -> Candidate:
    """Return the plainest of the candidates that are as fast as the fastest (`AS_FAST`).

    A ring is plainer than heads that a node shares. Then come a direct exchange and heads that cross nodes
    (`Family`). A double ring comes before a flat one. Of ways as plain the one with the fewest bytes
    between nodes wins, then within. So backward sends the side with fewer bytes; if both have as many,
    queries, the paper's choice. A causal ring is mirrored: more rows stay at home, and peak memory is less.
    """
    fastest = min(candidate.seconds for candidate in costed)
    return min((c for c in costed if c.seconds <= AS_FAST * fastest), key=_order)


def _order(c: Candidate) -> tuple[float, ...]:
    route = c.route
    plainness = c.family, c.ring == "flat"
    sent = c.inter_bytes, c.intra_bytes
    # On a ring of one "kv" can start before all of dO has arrived.
    second = (c.direction == Pass.QUERY) == (route.positions == 1)
    return (*plainness, *sent, route.heads, route.outer, second, route.mirrored)


def reason(chosen: Candidate, costed: Sequence[Candidate]) -> str:
    """Say why a candidate was chosen."""
    if chosen.seconds == 0:
        return "nothing is to be done"
    bound = chosen.compute_seconds / chosen.seconds
    kernel_share = f"{bound:.0%} of its {chosen.seconds:.3g} s is kernel time"
    others = [c for c in costed if c is not chosen]
    if not others:
        return f"no other way is left; {kernel_share}"
    rival = min(others, key=lambda c: c.seconds)
    ratio = rival.seconds / chosen.seconds
    if ratio > AS_FAST:
        return f"fastest of the ways tried: the next, {rival}, takes {ratio - 1:.0%} longer; {kernel_share}"
    if ratio >= 1:
        behind = f"fastest of the ways tried, with {rival} {ratio - 1:.2%} behind"
        return f"{behind}; {_preferred(chosen, rival)}; {kernel_share}"
    return (
        f"as fast as {rival} ({1 / ratio - 1:.2%} slower, which the model cannot tell); "
        f"{_preferred(chosen, rival)}; {kernel_share}"
    )


def _preferred(chosen: Candidate, rival: Candidate) -> str:
    """Say why a candidate is preferred to one that is as fast."""
    if chosen.family != rival.family:
        return f"{chosen.family.phrase} is plainer than {rival.family.phrase}"
    for link, ours, theirs in (
        ("between nodes", chosen.inter_bytes, rival.inter_bytes),
        ("within nodes", chosen.intra_bytes, rival.intra_bytes),
    ):
        if ours != theirs:
            saved = f"moves {1 - ours / theirs:.0%} fewer bytes {link}" if ours < theirs else ""
            return f"it {saved or 'is the plainer'}"
    return "it is the plainer"
