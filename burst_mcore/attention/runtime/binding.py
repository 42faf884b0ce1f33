"""A program bound once for all its runs: a flat list of steps, each with the rows that its buffers hold.

A run of the program then looks nothing up but buffers. `executor.Ring` carries the steps out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from burst_mcore.attention.geometry.rows import Rows, relative_to
from burst_mcore.attention.schedule.actions import (
    GROUPS,
    HOME,
    KEPT,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Kind,
    Pack,
    Program,
    Recv,
    Return,
    Send,
    Unpack,
    Wait,
    by_hop,
)
from burst_mcore.attention.schedule.ring import kind_of


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


class AttendStep(NamedTuple):
    """A compute, with the rows that its bundle has."""

    action: Compute
    rows: Rows | None


class Collect(NamedTuple):
    """An accumulate, with room for its sum, and for the total if the sum is complete."""

    action: Accumulate
    sums: Room
    total: Room | None


class Keep(NamedTuple):
    """An accumulate of the rank's own share, which stays with it."""

    action: Accumulate


class TakeIn(NamedTuple):
    """The end of a gradient's way: (buffer, rows) of the sums of others that came home."""

    action: Return
    sums: tuple[tuple[str, Rows | None], ...]


class Join(NamedTuple):
    """An addition of one sum to another."""

    action: Add
    sums: Room
    places: Rows | None
    """Where rows go, if the sum that is added has fewer."""


BoundStep = Post | AttendStep | Collect | Keep | TakeIn | Join | Wait | Pack | Unpack


@dataclass(frozen=True)
class Bound:
    """The steps of a program."""

    steps: tuple[BoundStep, ...]


def bind(program: Program) -> Bound:
    """Return the program as steps."""
    binder = _Binder()
    steps = [step for channel, actions in by_hop(program) for step in binder.steps(channel, actions)]
    return Bound(tuple(steps))


class _Binder:
    def __init__(self) -> None:
        self.rows: dict[str, Rows | None] = {HOME: None}
        """By buffer that exists."""

    def steps(self, channel: Channel | None, actions: list[Action]) -> list[BoundStep]:
        if channel is None:
            return [step for action in actions if (step := self.step(action)) is not None]
        return [Post(channel, actions, tuple(self.parcel(action) for action in actions))]

    def step(self, action: Action) -> BoundStep | None:
        match action:
            case Compute():
                return AttendStep(action, self.rows[action.buffer])
            case Accumulate(buffer=buffer) if buffer == KEPT:
                return Keep(action)
            case Accumulate():
                sums = self.room(action.buffer, action.rows, fresh=action.first)
                total = None if action.into is None else self.room(action.into, action.rows, fresh=True)
                return Collect(action, sums, total)
            case Add():
                others = self.rows[action.other]
                sums = self.room(action.buffer, action.rows, fresh=action.first)
                places = None if others is None or others == action.rows else relative_to(action.rows, others)
                return Join(action, sums, places)
            case Return():
                came = (buffer for buffer in action.buffers if buffer != KEPT)
                return TakeIn(action, tuple((buffer, self.rows[buffer]) for buffer in came))
            case Wait() | Pack() | Unpack():
                return action
        return None

    def parcel(self, action: Action) -> Parcel:
        if isinstance(action, Recv):
            within_group = action.channel.link in GROUPS
            return Parcel(action, None if within_group else self.room(action.buffer, action.rows), None)
        assert isinstance(action, Send)
        held = self.rows.get(action.buffer)
        if action.channel.link in GROUPS or held == action.rows:
            return Parcel(action, None, None)
        assert action.rows is not None
        return Parcel(action, None, relative_to(held, action.rows))

    def room(self, name: str, rows: Rows | None, *, fresh: bool = True) -> Room:
        """Return room for rows in a buffer: uninitialised if `fresh`, else with its data and zeros."""
        before, exists = self.rows.get(name), name in self.rows
        self.rows[name] = rows
        held = before == rows if exists else False
        kept = exists and not held and not fresh
        assert before is not None or not kept  # a buffer with room for all rows never grows
        return Room(name, kind_of(name), rows, held, relative_to(rows, before) if kept and before else None)
