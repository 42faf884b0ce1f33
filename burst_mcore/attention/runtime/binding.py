"""A program as a flat list of steps, each with the rows of its buffers, for `executor.Executor`.

The list is cached for all executions: they look up buffers, and compute no rows.
"""

from __future__ import annotations

from typing import NamedTuple

from burst_mcore.attention.geometry.rows import Rows, relative_to
from burst_mcore.attention.schedule.actions import (
    HOME,
    OWN_SHARE,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Kind,
    Link,
    Pack,
    Program,
    Recv,
    Return,
    Send,
    Unpack,
    Wait,
    posted_together,
)
from burst_mcore.attention.schedule.ring import at_home, kind_of


class Room(NamedTuple):
    """A buffer with room for some rows."""

    name: str
    kind: Kind
    rows: Rows | None
    """The rows in the buffer from this step on; None: all."""
    held: bool
    """Whether the buffer had room for the same rows before."""
    places: Rows | None
    """The new places of the previous rows; None if they are not kept."""


class Parcel(NamedTuple):
    """A message with its buffer."""

    action: Send | Recv
    room: Room | None
    """The receive buffer on the ring; None for a send, and within a head group."""
    cut: Rows | None
    """The places of the sent rows in the buffer; None: all."""


class Post(NamedTuple):
    """The messages of one channel that start together."""

    channel: Channel
    actions: list[Action]
    parcels: tuple[Parcel, ...]


class ComputeStep(NamedTuple):
    """A compute, with the rows of its block."""

    action: Compute
    rows: Rows | None
    is_last: bool
    """Whether no later compute of the program reads a block of the same ring rank."""


class AccumulateStep(NamedTuple):
    """An accumulate, with room for its sum, and for the total if the sum is complete."""

    action: Accumulate
    sums: Room
    total: Room | None


class KeepStep(NamedTuple):
    """The final addition to the gradient of the rank's own block: local gradients, and received sums."""

    action: Accumulate | Return
    sums: tuple[tuple[str, Rows | None], ...]
    """(buffer, rows); local gradients have no buffer."""


class AddStep(NamedTuple):
    """An addition of one sum to another."""

    action: Add
    sums: Room
    places: Rows | None
    """The places of the added rows, if the added sum has fewer rows."""


class Drop(NamedTuple):
    """The release of a buffer after its last use."""

    buffer: str


BoundStep = Post | ComputeStep | AccumulateStep | KeepStep | AddStep | Wait | Pack | Unpack | Drop
Bound = tuple[BoundStep, ...]
"""The steps of a program."""


def bind(program: Program) -> Bound:
    """Return the program as steps. Buffers are released early, except staying rows and results."""
    binder = _Binder(program)
    steps: list[BoundStep] = []
    for channel, actions in posted_together(program):
        if channel is not None:
            steps.append(Post(channel, actions, tuple([binder.parcel(action) for action in actions])))
        for action in actions if channel is None else ():
            steps.append(binder.step(action))
            binder.use(action, len(steps))
    ends, permanent = [*binder.ends, *binder.last.items()], (HOME, OWN_SHARE, *at_home(program))
    for name, place in sorted(ends, key=lambda end: end[1], reverse=True):
        if name not in permanent:
            steps.insert(place, Drop(name))
    return tuple(steps)


class _Binder:
    def __init__(self, program: Program) -> None:
        self.last_computes = {each.source: each for each in program if isinstance(each, Compute)}
        """The last compute with a block of each ring rank."""
        self.rows: dict[str, Rows | None] = {HOME: None}
        """The rows of each existing buffer."""
        self.under_way: dict[Channel, list[str]] = {}
        """Buffers of messages in flight: in use until the wait."""
        self.read = HOME
        """The block of the last compute: in use until its gradients are added."""
        self.computed = 0
        """The number of steps up to the last compute."""
        self.last: dict[str, int] = {}
        """The number of steps up to the last use of each buffer."""
        self.ends: list[tuple[str, int]] = []
        """The same, for earlier memory of buffers that got other room."""

    def use(self, action: Action, place: int) -> None:
        """Note the buffers that the step before `place` uses."""
        names: set[str | None] = {getattr(action, name, None) for name in ("buffer", "addend", "into")}
        match action:
            case Compute():
                self.read, self.computed = action.buffer, place
            case Accumulate():
                names.add(self.read)
            case Wait():
                names.update(self.under_way.pop(action.channel))
        self.last |= {name: place for name in names if name}

    def step(self, action: Action) -> BoundStep:
        match action:
            case Compute():
                is_last = action == self.last_computes[action.source]
                return ComputeStep(action, self.rows[action.buffer], is_last)
            case Accumulate(buffer=buffer) if buffer == OWN_SHARE:
                return KeepStep(action, ((OWN_SHARE, None),))
            case Accumulate():
                sums = self.room(action.buffer, action.rows, fresh=action.first)
                total = None if action.into is None else self.room(action.into, action.rows, fresh=True)
                return AccumulateStep(action, sums, total)
            case Add():
                others = self.rows[action.addend]
                sums = self.room(action.buffer, action.rows, fresh=action.first)
                places = None if others is None or others == action.rows else relative_to(action.rows, others)
                return AddStep(action, sums, places)
            case Return():
                received = (buffer for buffer in action.buffers if buffer != OWN_SHARE)
                return KeepStep(action, tuple((buffer, self.rows[buffer]) for buffer in received))
        assert isinstance(action, (Wait, Pack, Unpack))
        return action

    def parcel(self, action: Action) -> Parcel:
        assert isinstance(action, (Send, Recv))
        self.under_way.setdefault(action.channel, []).append(action.buffer)
        if action.channel.link == Link.HEADS:
            return Parcel(action, None, None)
        if isinstance(action, Recv):
            return Parcel(action, self.room(action.buffer, action.rows), None)
        stored_rows = self.rows[action.buffer]
        if stored_rows == action.rows:
            return Parcel(action, None, None)
        assert action.rows is not None
        return Parcel(action, None, relative_to(stored_rows, action.rows))

    def room(self, name: str, rows: Rows | None, *, fresh: bool = True) -> Room:
        """Return room for rows in a buffer: uninitialised if `fresh`, else with its data and zeros."""
        old_rows, exists = self.rows.get(name), name in self.rows
        self.rows[name] = rows
        is_ready = old_rows == rows if exists else False
        keeps_data = exists and not is_ready and not fresh
        if fresh and name in self.last and (not is_ready or self.last[name] < self.computed):
            self.ends.append((name, self.last.pop(name)))  # a launch in between can use the memory
            is_ready = False
        assert old_rows is not None or not keeps_data  # a buffer with room for all rows never grows
        places = relative_to(rows, old_rows) if keeps_data and old_rows else None
        return Room(name, kind_of(name), rows, is_ready, places)
