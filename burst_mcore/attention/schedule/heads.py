"""The program of head x ring: the all-to-all of a head group around the ring of one of its members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.schedule.actions import (
    Action,
    Channel,
    Compute,
    Kind,
    Link,
    Pack,
    Program,
    Recv,
    Send,
    Unpack,
    Wait,
)
from burst_mcore.attention.schedule.carried import Carried


class Moves(NamedTuple):
    """Which bundles, rows and gradients a pass moves."""

    title: str
    gradients: bool
    """Gradients follow the bundle."""
    bundle: bool
    """The travelling bundle first comes through the head group."""
    rows: bool
    """The rows that stay come through the head group, too."""


def with_heads(
    ring: Program,
    rank: int,
    placement: Placement,
    moves: Moves,
    *,
    by_part: bool,
    leaving: Mapping[int, Carried] | None = None,
) -> Program:
    """Put the all-to-all of a head group around the ring of the position that its members share.

    The travelling bundle comes first, in whole, so that the ring can start. The rows that stay come from two
    members at a time and are computed as they come (own first), while the ring makes its first hop. In the
    last step the rows are computed member by member (own last). The results of two members leave for them
    while the next are computed. The gradient that followed the bundle leaves in whole, at the very end.

    Args:
        ring: the program of the position, between positions.
        rank: this rank.
        placement: the ranks of each head group.
        moves: the bundles, rows and gradients of the pass.
        by_part: compute the first and last step member by member; else all rows at once.
        leaving: the steps after which results leave, and how many rows of them; default the last, all.
    """
    if leaving is None:
        leaving = {max(action.step for action in ring if isinstance(action, Compute)): None}
    return tuple(_Member(ring, rank, placement, moves, by_part, leaving).actions())


class _Member:
    def __init__(
        self,
        ring: Program,
        rank: int,
        placement: Placement,
        moves: Moves,
        by_part: bool,
        leaving: Mapping[int, Carried],
    ) -> None:
        self.ring, self.placement, self.moves, self.by_part, self.leaving = (
            ring, placement, moves, by_part, leaving
        )  # fmt: skip
        heads = self.heads = placement.heads
        self.position, self.member = placement.position(rank), placement.member(rank)
        self.arrived: set[Channel] = set()
        """Channels that were waited for."""
        self.shifts = [sorted({shift, heads - shift}) for shift in range(1, heads // 2 + 1)]
        """Shifts s: send to member m + s, receive from member m - s. The two shifts between the same two
        members start together. On gloo nothing is sent before the receiver has said that it is ready.
        That word would otherwise queue behind all that it sends to the same member."""
        self.others = [shift for pair in self.shifts for shift in pair]

    def actions(self) -> Iterator[Action]:
        for kind in (Kind.BUNDLE,) * self.moves.bundle + (Kind.ROWS,) * self.moves.rows:
            yield from self.leave(0, kind)
        if self.moves.bundle:
            yield from self.arrive(0, Kind.BUNDLE)
        for action in self.ring:
            if isinstance(action, Compute):
                yield from self.compute(action)
            elif isinstance(action, (Send, Recv)):
                yield replace(action, peer=self.placement.rank(action.peer, self.member))
            else:
                yield action
        if self.moves.gradients:
            yield from self.leave(action.step, Kind.SUM)
        for kind in (Kind.RESULT,) + (Kind.SUM,) * self.moves.gradients:
            yield from self.arrive(action.step, kind)

    def compute(self, action: Compute) -> Iterator[Action]:
        entering, leaving = action.step == 0 and self.moves.rows, action.step in self.leaving
        if self.by_part and (entering or leaving):
            yield from self.compute_by_part(action, entering, leaving)
            return
        if entering:
            yield from self.arrive(action.step, Kind.ROWS)
        yield action
        if leaving:
            yield from self.leave(action.step, Kind.RESULT)

    def compute_by_part(self, action: Compute, entering: bool, leaving: bool) -> Iterator[Action]:
        for shifts in ([0], *self.shifts) if entering else (*self.shifts, [0]):
            for shift in shifts:
                if entering:
                    yield from self.arrive_from(action.step, Kind.ROWS, shift)
                yield replace(action, part=self.after(-shift))
            if leaving and shifts != [0]:
                yield from self.exchange(action.step, Kind.RESULT, shifts)

    def leave(self, step: int, kind: Kind) -> Iterator[Action]:
        for shifts in self.shifts:
            yield from self.exchange(step, kind, shifts)

    def arrive(self, step: int, kind: Kind) -> Iterator[Action]:
        for shift in (0, *self.others):
            yield from self.arrive_from(step, kind, shift)

    def exchange(self, step: int, kind: Kind, shifts: Sequence[int]) -> Iterator[Action]:
        """Send to the members at these shifts, receive from the members at the opposite ones."""
        for shift in shifts:
            to = self.after(shift)
            yield Pack(step, kind, f"{kind}.to{to}", to)
        for shift in shifts:
            source = self.after(-shift)
            yield Recv(step, self.channel(kind, shift), f"{kind}.from{source}", self.rank_of(source))
        rows = self.leaving[step] if kind == Kind.RESULT else None
        for shift in shifts:
            to = self.after(shift)
            yield Send(step, self.channel(kind, shift), f"{kind}.to{to}", self.rank_of(to), rows)

    def arrive_from(self, step: int, kind: Kind, shift: int) -> Iterator[Action]:
        source, channel = self.after(-shift), self.channel(kind, shift)
        if shift and channel not in self.arrived:
            self.arrived.add(channel)
            yield Wait(step, channel)
        yield Unpack(step, kind, f"{kind}.from{source}", source)

    def after(self, shift: int) -> int:
        """Return the member at a shift."""
        return (self.member + shift) % self.heads

    def rank_of(self, member: int) -> int:
        """Return the rank of a member of the own head group."""
        return self.placement.rank(self.position, member)

    def channel(self, kind: Kind, shift: int) -> Channel:
        return Channel(Link.HEADS, kind, min(shift, self.heads - shift))
