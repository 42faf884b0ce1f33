"""Programs of exchanges as data: they print as a grid, are verified, and count their bytes.

Messages are the `Send`, `Recv` and `Wait` of attention's schedules. A scan has one action more, `Compose`,
halos and heads have `Copy`. The buffers of a scan are spans of a chain, by name: "0[2:5]" is the map over
fragments 2 to 4 of chain 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from burst_mcore.attention.schedule.actions import Channel, Kind, Link, Recv, Send, Wait
from burst_mcore.attention.schedule.route import grid


class Span(NamedTuple):
    """The map over fragments [first, stop) of a chain. If it begins with the chain it is a state alone."""

    chain: int
    first: int
    stop: int

    @property
    def is_state(self) -> bool:
        """Whether the state before it is zero, so that the map's A is not needed."""
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
    """Make the map over `earlier` and `later`, which follow one another."""

    step: int
    earlier: Span
    later: Span

    @property
    def span(self) -> Span:
        """The span of the new map."""
        return Span(self.earlier.chain, self.earlier.first, self.later.stop)

    def __str__(self) -> str:
        return f"{self.span}={self.later}*{self.earlier}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy rows of a rank's shard to rows of its halo, or the other way round."""

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
"""The channel of their gradients."""


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
        """Return the bytes that a rank receives, by the sizes that `size_of` takes."""
        return sum(size_of(action, **sizes) for action in self.programs[rank] if isinstance(action, Recv))


def size_of(message: Recv, *, state: int = 0, decay: int = 0, row: int = 0) -> int:
    """Return the bytes of a message: of a state, and of A where the map has one, or of rows."""
    if message.rows is not None:
        return row * sum(map(len, message.rows))
    return state + decay * (not Span.of(message.buffer).is_state)
