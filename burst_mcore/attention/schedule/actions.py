"""The actions of a schedule: sends, receives, waits, computes and sums of named buffers, as data."""

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
"""The receive buffer of the sum of the previous nodes."""

OWN_SHARE = "own share"
"""The buffer of the local gradient of the rank's own block: it never rotates."""
SUM = "sum"
"""The prefix of names of buffers that sum the gradients of rotating blocks."""
HOME_SUM = "sum home"
"""The owner's buffer that sums the gradients of other ranks in a direct exchange."""
TOTAL, HOME_TOTAL = "total", "total home"
"""The buffers of complete sums in the last message to the owner: the sender's, and the owner's."""


class _Word(StrEnum):
    """A closed set of strings: settings, JSON, traces and errors show the string."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        raise ValueError(f"unknown {cls.__name__.lower()} {value!r}; legal: {', '.join(cls)}")

    __repr__ = str.__repr__


class Pass(_Word):
    """A pass over the ring: forward, or a backward, named after the side that rotates."""

    FORWARD = "forward"
    """K and V rotate, and nothing follows (the paper's appendix: forward pass of Ring/BurstAttention)."""
    KV = "kv"
    """K and V rotate, dK and dV follow (paper algorithm 1, RingAttention)."""
    QUERY = "query"
    """Q, dO, D and LSE rotate, dQ follows (paper algorithm 2, BurstAttention)."""


class Link(_Word):
    """The pair of ranks that a message connects."""

    INTRA = "intra"
    """Neighbours on the ring within one node."""
    INTER = "inter"
    """Ranks of one local rank on neighbouring nodes."""
    DIRECT = "direct"
    """Any two ranks."""
    HEADS = "heads"
    """Members of one head group."""


class Kind(_Word):
    """The contents of a message."""

    DATA = "data"
    """A Q block or a KV block."""
    GRADIENT = "gradient"
    """The sum of gradients that follows a block."""
    TOTAL = "total"
    """The complete sum of other ranks' gradients, sent to the owner in the dtype of the result."""
    ROTATING_IN = "rotating in"
    """Into the head group: the block that will rotate."""
    STAYING_IN = "staying in"
    """Into the head group: the rows that stay."""
    STAYING_OUT = "staying out"
    """Out of the head group: the results of the rows that stay."""
    ROTATING_OUT = "rotating out"
    """Out of the head group: the gradient of the block that rotated."""


COMES_LATE = (Kind.GRADIENT, Kind.TOTAL, Kind.STAYING_OUT, Kind.ROTATING_OUT)
"""Kinds of messages with computed contents; the other kinds can be sent at once."""


class Channel(NamedTuple):
    """A set of messages with one wait. Messages of one link and kind keep their order."""

    link: Link
    kind: Kind
    distance: int = 0
    """The distance of the ranks, where messages of one link and kind have a wait for each; else 0."""

    def __str__(self) -> str:
        return f"{self.link} {self.kind}{f' {self.distance}' if self.distance else ''}"


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
        many = sum(len(each) for each in self.rows or () if isinstance(each, range))
        return f"{self.buffer}{self.SIGN}{self.peer}{'' if self.rows is None else f'({many})'}"


class Send(_Message[T]):
    """Start sending `rows` of `buffer` to rank `peer`; no write to the buffer before the channel's Wait."""

    __slots__ = ()
    SIGN = ">"


class Recv(_Message[T]):
    """Start receiving from rank `peer` into `buffer`; no access to the buffer before the channel's Wait."""

    __slots__ = ()
    SIGN = "<"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for all started messages of `channel`."""

    step: int
    channel: Channel

    def __str__(self) -> str:
        return f"wait {self.channel}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute attention of the staying rows with the block of ring rank `source`, in `buffer`.

    The staying rows are the ring rank's; with `part`, the rows of one member of the head group.
    """

    step: int
    source: int
    buffer: str
    part: int | None = None

    def __str__(self) -> str:
        return f"[{self.source}{'' if self.part is None else f'.{self.part}'}]"


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[T]):
    """Add the gradients of the last Compute to the sum in `buffer`; if `first`, set it.

    Afterwards the buffer holds `rows`. The computed block is still in its buffer: a kernel that adds to the
    sum itself reads the block once more.
    """

    step: int
    source: int
    buffer: str
    first: bool
    rows: Carried[T] = None
    into: str | None = None
    """The buffer of the complete sum, written instead of `buffer`, which is free then."""

    def __str__(self) -> str:
        if self.into is None:
            return f"{self.buffer}{'=' if self.first else '+='}d[{self.source}]"
        return f"{self.into}={'' if self.first else f'{self.buffer}+'}d[{self.source}]"


@dataclass(frozen=True, slots=True)
class Add(Generic[T]):
    """Add the sum in `addend`, of the same block, to the sum in `buffer`; if `first`, set it.

    Afterwards the buffer holds `rows`.
    """

    step: int
    buffer: str
    addend: str
    first: bool = False
    rows: Carried[T] = None

    def __str__(self) -> str:
        return f"{self.buffer}{'' if self.first else '+'}={self.addend}"


@dataclass(frozen=True, slots=True)
class Return:
    """Sum these buffers to the gradient of the rank's own block; none: no rank reads the block."""

    step: int
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        return f"done {' + '.join(self.buffers) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy between a tensor and the parcel of one member of a head group."""

    step: int
    kind: Kind
    buffer: str
    member: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.buffer}"


class Pack(_Copy):
    """Copy the rows or heads for member `member` of the group into `buffer`."""

    __slots__ = ()


class Unpack(_Copy):
    """Copy the rows or heads received from member `member` of the group out of `buffer`."""

    __slots__ = ()


Action = Send[T] | Recv[T] | Wait | Compute | Accumulate[T] | Add[T] | Return | Pack | Unpack
Program = tuple[Action[T], ...]


def posted_together(program: Program[T]) -> Iterator[tuple[Channel | None, list[Action[T]]]]:
    """Yield a program in parts: (channel, its neighbouring sends and receives), or (None, other actions).

    The messages of a part start together.
    """
    for channel, group in groupby(program, key=lambda a: a.channel if isinstance(a, (Send, Recv)) else None):
        yield channel, list(group)


class Recorder(Protocol):
    """A listener to the executor's actions, for timelines: see burst_bench/trace.py."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Time an action, and the messages that it waits for."""

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Note the start of messages."""


RECORDERS: list[Recorder] = []
"""Recorders of this process, the innermost last: global, since backward runs in another thread."""
