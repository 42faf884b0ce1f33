"""A way to run a call, with its predicted cost; or with a lower bound of it, where that was enough."""

from __future__ import annotations

from dataclasses import dataclass

from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route


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
    tied: int
    """Ranks that one exchange across nodes ties together; 0 where none crosses.

    A hop of the double ring ties its two ends, an all-to-all all ranks that share heads. A direct exchange
    ties all readers of one rank, if some are on another node. A ring over the ranks of several nodes ties all
    of them: they wait for its slow hop.
    """

    resident_bytes: int = 0
    """Memory that a rank of a mesh needs for rows of others that stay with it, for their results, and for the
    shares of its own that come at the same time."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        """Time in which the busiest rank's kernel does not run: communication that is not hidden."""
        return max(0.0, self.seconds - self.compute_seconds)

    @property
    def crosses_flat(self) -> bool:
        """Whether one ring goes over all ranks of several nodes."""
        return self.ring == "flat" and self.tied > 2

    def __str__(self) -> str:
        ring = f"{self.ring}{', mirrored' * self.route.mirrored}"
        ring = f"mesh of {self.route.rings} x {self.route.places}" if self.route.rings > 1 else ring
        return f"{ring}, head_parallel={self.route.heads}{' outer' * self.route.outer}, {self.direction}"


@dataclass(frozen=True)
class Slower:
    """A way that was not simulated, since a lower bound on its time is above the time of the fastest."""

    ring: str
    heads: int
    outer: bool
    direction: Pass
    at_least: float
    """Seconds."""

    def __str__(self) -> str:
        return f"{self.ring}, head_parallel={self.heads}{' outer' * self.outer}, {self.direction}"
