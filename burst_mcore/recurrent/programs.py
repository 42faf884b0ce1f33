"""Programs of exchanges as data: they print as a grid, are verified, and count their bytes.

Messages are the `Send`, `Recv` and `Wait` of attention's schedules. A scan also has `Compose`, halos have
`Copy`. The buffers of a scan are named after spans of a chain: "0[2:5]" is the map over fragments 2 to 4 of
chain 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from burst_mcore.attention.schedule.actions import Channel, Kind, Link, Recv, Send, Wait
from burst_mcore.attention.schedule.route import grid


class Span(NamedTuple):
    """The map over fragments [first, stop) of a chain; from the chain's start on, only a state."""

    chain: int
    first: int
    stop: int

    @property
    def is_state(self) -> bool:
        """Whether the span starts its chain, so that the map needs no A."""
        return self.first == 0

    def __str__(self) -> str:
        return f"{self.chain}[{self.first}:{self.stop}]"

    @classmethod
    def of(cls, name: str) -> Span:
        """Return the span of a buffer's name."""
        chain, _, bounds = name.rstrip("]").partition("[")
        first, _, stop = bounds.partition(":")
        return cls(int(chain), int(first), int(stop))


@dataclass(frozen=True, slots=True)
class Compose:
    """Compose the maps over `earlier` and the next span, `later`."""

    step: int
    earlier: Span
    later: Span

    @property
    def span(self) -> Span:
        return Span(self.earlier.chain, self.earlier.first, self.later.stop)

    def __str__(self) -> str:
        return f"{self.span}={self.later}*{self.earlier}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy rows of a rank's shard to rows of its halo, or in backward from the halo to the shard."""

    step: int
    rows: range
    into: range

    def __str__(self) -> str:
        return f"copy({len(self.rows)})"


Action = Send | Recv | Wait | Compose | Copy
Program = tuple[Action, ...]
DATA = Channel(Link.DIRECT, Kind.DATA)
"""The channel of states, and of rows of shards."""
GRADIENT = Channel(Link.DIRECT, Kind.GRADIENT)
"""The channel of gradients."""


@dataclass(frozen=True)
class Exchange:
    """The programs of all ranks."""

    title: str
    programs: tuple[Program, ...]
    intra: int
    """Ranks of a node."""

    def __str__(self) -> str:
        """Return a grid of step x rank: x<r receives from rank r, x>r sends, x=z*y composes."""
        title = f"{self.title}; {len(self.programs) // self.intra} x {self.intra} ranks"
        lines = grid(self.programs)  # type: ignore[arg-type]  # the other actions print alike
        return "\n".join([title, *lines])

    def received(self, rank: int, **sizes: int) -> int:
        """Return the bytes that a rank receives; sizes: arguments of `size_of`."""
        return sum(size_of(action, **sizes) for action in self.programs[rank] if isinstance(action, Recv))


def size_of(message: Recv, *, state: int = 0, decay: int = 0, row: int = 0) -> int:
    """Return the bytes of a message: of a state and the A of its map, if any, or of rows."""
    if message.rows is not None:
        return row * sum(map(len, message.rows))
    return state + decay * (not Span.of(message.buffer).is_state)
