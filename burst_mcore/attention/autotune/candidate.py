"""A way to run a call, with its predicted cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route


class Family(IntEnum):
    """The kinds of ways between which "auto" chooses, the plainest first: equally fast, the first wins."""

    RING = 0
    HEADS_WITHIN = 1
    DIRECT = 2
    HEADS_ACROSS = 3
    MESH = 4

    @classmethod
    def of(cls, route: Route, intra: int) -> Family:
        """Return the last word that a route needs; intra: ranks of a node."""
        if route.rings > 1:
            return cls.MESH
        if route.heads > 1 and route.size > intra and (route.outer or intra % route.heads):
            return cls.HEADS_ACROSS
        if route.direct:
            return cls.DIRECT
        return cls.HEADS_WITHIN if route.heads > 1 else cls.RING

    @property
    def phrase(self) -> str:
        phrases = "a ring", "heads within a node", "a direct exchange", "heads across nodes", "a mesh"
        return phrases[self]


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
    resident_bytes: int = 0
    """Memory that a rank of a mesh needs for rows of others that stay with it, for their results, and for the
    shares of its own that come at the same time."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        ring = f"{self.ring}{', mirrored' * self.route.mirrored}"
        ring = f"mesh of {self.route.rings} x {self.route.places}" if self.route.rings > 1 else ring
        return f"{ring}, head_parallel={self.route.heads}{' outer' * self.route.outer}, {self.direction}"
