"""The actions of a schedule: all that a rank can do with named buffers. Data, no behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import ClassVar, Generic, NamedTuple, Protocol, Self

from burst_mcore.attention.schedule.carried import Carried, T

HOME = "home"
"""The rank's own block: never written."""
PARTIAL = "partial"
"""The buffer in which the sum of the nodes before arrives."""

OWN_SHARE = "kept"
"""The rank's own share of the gradient of its own block: it never rotates."""
SUM = "sum"
"""The first part of the names of buffers in which gradients of rotating blocks are summed."""
HOME_SUM = "sum home"
"""The buffer that sums the shares of other ranks which come straight back."""
TOTAL, HOME_TOTAL = "total", "total home"
"""The buffers of sums on their last hop: of another rank's block on its way home, and of the rank's own."""


class _Word(StrEnum):
    """A closed set of words, whose members are strings: settings, JSON, traces and messages show the word."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        raise ValueError(f"unknown {cls.__name__.lower()} {value!r}; legal: {', '.join(cls)}")

    __repr__ = str.__repr__


class Pass(_Word):
    """A pass over the ring: forward, or a backward, named after the side that rotates."""

    FORWARD = "forward"
    """K and V rotate, and nothing follows (paper algorithm 4)."""
    KV = "kv"
    """K and V rotate, dK and dV follow (paper algorithm 1, RingAttention)."""
    QUERY = "query"
    """Q, dO, D and LSE rotate, dQ follows (paper algorithm 2, BurstAttention)."""


class Link(_Word):
    """Which ranks a message connects."""

    INTRA = "intra"
    """Neighbours around one node."""
    INTER = "inter"
    """The same place of neighbouring nodes."""
    DIRECT = "direct"
    """Any two ranks."""
    HEADS = "heads"
    """Members of one head group."""


class Kind(_Word):
    """The contents of a message."""

    DATA = "data"
    """A block that rotates: of queries, or of keys and values."""
    GRADIENT = "gradient"
    """The sum of gradients that follows a block."""
    TOTAL = "total"
    """The sum of all shares but the owner's on its last ring step, rounded to the dtype that is returned."""
    ROTATING_IN = "rotating in"
    """Into the head group: the block that will rotate."""
    STAYING_IN = "staying in"
    """Into the head group: the rows that stay."""
    STAYING_OUT = "staying out"
    """Out of the head group: the results of the rows that stay."""
    ROTATING_OUT = "rotating out"
    """Out of the head group: the gradient of the block that rotated."""


COMES_LATE = (Kind.GRADIENT, Kind.TOTAL, Kind.STAYING_OUT, Kind.ROTATING_OUT)
"""Kinds of messages whose contents must be computed first; the others can be sent at once."""


class Channel(NamedTuple):
    """Messages that are waited for together. Messages of one link and kind keep their order."""

    link: Link
    kind: Kind
    part: int = 0
    """Messages of one kind that are waited for one by one."""

    def __str__(self) -> str:
        return f"{self.link} {self.kind}{f' {self.part}' if self.part else ''}"


@dataclass(frozen=True, slots=True)
class _Message(Generic[T]):
    """One end of a message: `rows` of `buffer`, to or from rank `peer`."""

    SIGN: ClassVar[str]
    step: int
    channel: Channel
    buffer: str
    peer: int
    rows: Carried[T] = None

    def __str__(self) -> str:
        return f"{self.buffer}{self.SIGN}{self.peer}{_of(self.rows)}"


class Send(_Message[T]):
    """Start sending `rows` of `buffer` to rank `peer`. Until its channel's Wait it may not be written."""

    __slots__ = ()
    SIGN = ">"


class Recv(_Message[T]):
    """Start receiving from rank `peer` into `buffer`; it may not be touched until the channel's Wait."""

    __slots__ = ()
    SIGN = "<"


@dataclass(frozen=True, slots=True)
class Wait:
    """Everything started on `channel` is complete."""

    step: int
    channel: Channel

    def __str__(self) -> str:
        return f"wait {self.channel}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Attend rows that stay to the block of ring rank `source`, which lies in `buffer`.

    These are the ring rank's own rows; with `part`, those of one member of the head group.
    """

    step: int
    source: int
    buffer: str
    part: int | None = None

    def __str__(self) -> str:
        return f"[{self.source}{'' if self.part is None else f'.{self.part}'}]"


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[T]):
    """Add the gradients of the last Compute to the sum in `buffer`; the `first` share is set.

    Afterwards the buffer holds `rows`. The block that was computed is still in place: a kernel that adds to
    the sum itself reads it once more.
    """

    step: int
    source: int
    buffer: str
    first: bool
    rows: Carried[T] = None
    into: str | None = None
    """The buffer to which the sum goes instead, since it is complete; `buffer` is free then."""

    def __str__(self) -> str:
        if self.into is None:
            return f"{self.buffer}{'=' if self.first else '+='}d[{self.source}]"
        return f"{self.into}={'' if self.first else f'{self.buffer}+'}d[{self.source}]"


@dataclass(frozen=True, slots=True)
class Add(Generic[T]):
    """Add the sum in `other`, of the same block, to the sum in `buffer`; if `first`, set it.

    Afterwards the buffer holds `rows`.
    """

    step: int
    buffer: str
    other: str
    first: bool = False
    rows: Carried[T] = None

    def __str__(self) -> str:
        return f"{self.buffer}{'' if self.first else '+'}={self.other}"


@dataclass(frozen=True, slots=True)
class Return:
    """The gradient of the rank's own block is the sum of these buffers; none: nobody reads the block."""

    step: int
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        return f"done {' + '.join(self.buffers) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of the share of one member of a head group."""

    step: int
    kind: Kind
    buffer: str
    member: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.buffer}"


class Pack(_Copy):
    """Copy the share of member `member` of the group into `buffer`."""

    __slots__ = ()


class Unpack(_Copy):
    """Copy the share that came from member `member` of the group out of `buffer`, to its place."""

    __slots__ = ()


Action = Send[T] | Recv[T] | Wait | Compute | Accumulate[T] | Add[T] | Return | Pack | Unpack
Program = tuple[Action[T], ...]


def _of(rows: Carried[T]) -> str:
    return "" if rows is None else f"({sum(len(each) for each in rows if isinstance(each, range))})"


def by_hop(program: Program[T]) -> Iterator[tuple[Channel | None, list[Action[T]]]]:
    """Yield the program in parts: (channel, the messages of one hop), or (None, other actions).

    Neighbouring sends and receives of one channel are one hop: they start together.
    """
    for channel, group in groupby(program, key=lambda a: a.channel if isinstance(a, (Send, Recv)) else None):
        yield channel, list(group)


class Recorder(Protocol):
    """The place where the executor tells when actions begin and end: see burst_bench/trace.py."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Take the time of an action, and of the messages that it waits for."""

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Note when the messages of a hop started."""


RECORDERS: list[Recorder] = []
"""Recorders of this process, the innermost last: backward runs in another thread, beyond a context."""
