"""A program bound once for all its runs: a flat list of steps, each with the rows that its buffers hold.

A run of the program then looks nothing up but buffers. `executor.Executor` carries the steps out.
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
    by_hop,
)
from burst_mcore.attention.schedule.ring import at_home, kind_of


class Room(NamedTuple):
    """A buffer that gets room for some rows."""

    name: str
    kind: Kind
    rows: Rows | None
    """The rows that it holds from now on; None: all."""
    held: bool
    """Whether it had room for the same rows before."""
    places: Rows | None
    """Where its rows of before go, if they are kept."""


class Parcel(NamedTuple):
    """A message of a hop, and the buffer that it leaves, or arrives in."""

    action: Send | Recv
    room: Room | None
    """Of a message that arrives on the ring; None within a head group, and of one that leaves."""
    cut: Rows | None
    """The places of the rows that are sent, if not all that the buffer holds."""


class Post(NamedTuple):
    """The messages of one hop, which start together."""

    channel: Channel
    actions: list[Action]
    parcels: tuple[Parcel, ...]


class ComputeStep(NamedTuple):
    """A compute, with the rows that its block has."""

    action: Compute
    rows: Rows | None
    is_last: bool
    """Whether no later compute of the program meets a block of the same ring rank."""


class AccumulateStep(NamedTuple):
    """An accumulate, with room for its sum, and for the total if the sum is complete."""

    action: Accumulate
    sums: Room
    total: Room | None


class KeepStep(NamedTuple):
    """The end of a gradient's way: of the rank's own share, and of sums of others that came home."""

    action: Accumulate | Return
    sums: tuple[tuple[str, Rows | None], ...]
    """(buffer, rows); the own share is in none."""


class AddStep(NamedTuple):
    """An addition of one sum to another."""

    action: Add
    sums: Room
    places: Rows | None
    """Where rows go, if the sum that is added has fewer."""


class Drop(NamedTuple):
    """The end of a buffer: nothing uses what it holds any more."""

    buffer: str


BoundStep = Post | ComputeStep | AccumulateStep | KeepStep | AddStep | Wait | Pack | Unpack | Drop
Bound = tuple[BoundStep, ...]
"""The steps of a program."""


def bind(program: Program) -> Bound:
    """Return the program as steps. Buffers end early, but for rows that stay and what is returned."""
    binder = _Binder(program)
    steps: list[BoundStep] = []
    for channel, actions in by_hop(program):
        if channel is not None:
            steps.append(Post(channel, actions, tuple([binder.parcel(action) for action in actions])))
        for action in actions if channel is None else ():
            steps.append(binder.step(action))
            binder.use(action, len(steps))
    ends, kept = [*binder.ends, *binder.last.items()], (HOME, OWN_SHARE, *at_home(program))
    for name, place in sorted(ends, key=lambda end: end[1], reverse=True):
        if name not in kept:
            steps.insert(place, Drop(name))
    return tuple(steps)


class _Binder:
    def __init__(self, program: Program) -> None:
        self.last_computes = {each.source: each for each in program if isinstance(each, Compute)}
        """The last compute with a block of each ring rank."""
        self.rows: dict[str, Rows | None] = {HOME: None}
        """By buffer that exists."""
        self.under_way: dict[Channel, list[str]] = {}
        """Buffers of messages, which use them until they are awaited."""
        self.read = HOME
        """The block of the last compute, whose gradients use it until they are added."""
        self.computed = 0
        """The number of steps up to the last compute."""
        self.last: dict[str, int] = {}
        """By buffer: the number of steps until nothing uses what it holds."""
        self.ends: list[tuple[str, int]] = []
        """The same, of what buffers held before they got other room."""

    def use(self, action: Action, place: int) -> None:
        """Note the buffers that the step before `place` uses."""
        names: set[str | None] = {getattr(action, name, None) for name in ("buffer", "other", "into")}
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
                others = self.rows[action.other]
                sums = self.room(action.buffer, action.rows, fresh=action.first)
                places = None if others is None or others == action.rows else relative_to(action.rows, others)
                return AddStep(action, sums, places)
            case Return():
                came = (buffer for buffer in action.buffers if buffer != OWN_SHARE)
                return KeepStep(action, tuple((buffer, self.rows[buffer]) for buffer in came))
        assert isinstance(action, (Wait, Pack, Unpack))
        return action

    def parcel(self, action: Action) -> Parcel:
        assert isinstance(action, (Send, Recv))
        self.under_way.setdefault(action.channel, []).append(action.buffer)
        if action.channel.link == Link.HEADS:
            return Parcel(action, None, None)
        if isinstance(action, Recv):
            return Parcel(action, self.room(action.buffer, action.rows), None)
        held = self.rows[action.buffer]
        if held == action.rows:
            return Parcel(action, None, None)
        assert action.rows is not None
        return Parcel(action, None, relative_to(held, action.rows))

    def room(self, name: str, rows: Rows | None, *, fresh: bool = True) -> Room:
        """Return room for rows in a buffer: uninitialised if `fresh`, else with its data and zeros."""
        before, exists = self.rows.get(name), name in self.rows
        self.rows[name] = rows
        held = before == rows if exists else False
        kept = exists and not held and not fresh
        if fresh and name in self.last and (not held or self.last[name] < self.computed):
            self.ends.append((name, self.last.pop(name)))  # a launch in between has its memory
            held = False
        assert before is not None or not kept  # a buffer with room for all rows never grows
        return Room(name, kind_of(name), rows, held, relative_to(rows, before) if kept and before else None)
