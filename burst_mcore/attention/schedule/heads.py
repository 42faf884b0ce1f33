"""Shared heads: who attends with which, and the all-to-all of a head group around its ring's program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Generic, NamedTuple

from burst_mcore.attention.geometry.shard import Placement
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
from burst_mcore.attention.schedule.carried import Carried, T


def share_of_heads(total: int, member: int, size: int) -> range:
    """Return the heads of `total` that a member of a head group of `size` attends with.

    Where there are fewer K/V heads than members, several members get the same one: no more than is needed.
    """
    first = member * total // size
    return range(first, max(first + 1, (member + 1) * total // size))


def why_not_heads(heads: int, kv_heads: int, degree: int) -> str | None:
    """Return why `degree` ranks cannot share these heads; None if they can."""
    if heads % degree:
        return f"{heads} heads do not divide by {degree}"
    if kv_heads % degree and degree % kv_heads:
        return f"{kv_heads} K/V heads and {degree} do not divide one another"
    return None


class Moves(NamedTuple):
    """Which blocks, rows and gradients a pass moves."""

    title: str
    gradients: bool
    """Gradients follow the block."""
    block: bool
    """The rotating block first comes through the head group."""
    rows: bool
    """The rows that stay come through the head group, too."""


def with_heads(
    ring: Program[T],
    rank: int,
    placement: Placement,
    moves: Moves,
    *,
    by_part: bool,
    leaving: Mapping[int, Carried[T]] | None = None,
) -> Program[T]:
    """Put the all-to-all of a head group around the ring of the ring rank that its members share.

    The rotating block comes first, in whole, so that the ring can start. The rows that stay come from two
    members at a time and are computed as they come (own first), while the ring makes its first hop. In the
    last step the rows are computed member by member (own last). The results of two members leave for them
    while the next are computed. The gradient that followed the block leaves in whole, at the very end.

    Args:
        ring: the program of the ring rank, between ring ranks.
        rank: this rank.
        placement: the ranks of each head group.
        moves: the blocks, rows and gradients of the pass.
        by_part: compute the first and last step member by member; else all rows at once.
        leaving: the steps after which results leave, and how many rows of them; default the last, all.
    """
    if leaving is None:
        leaving = {max(action.step for action in ring if isinstance(action, Compute)): None}
    return tuple(_Member(ring, rank, placement, moves, by_part, leaving).actions())


class _Member(Generic[T]):
    def __init__(
        self,
        ring: Program[T],
        rank: int,
        placement: Placement,
        moves: Moves,
        by_part: bool,
        leaving: Mapping[int, Carried[T]],
    ) -> None:
        self.ring, self.placement, self.moves = ring, placement, moves
        self.by_part, self.leaving = by_part, leaving
        self.ring_rank, self.member = placement.ring_rank(rank), placement.member(rank)
        size = self.size = placement.heads
        self.posted: set[Channel] = set()
        """Channels with something to wait for."""
        self.shifts = [sorted({shift, size - shift}) for shift in range(1, size // 2 + 1)]
        """Shifts s: send to member m + s, receive from member m - s. The two shifts between the same two
        members start together. On gloo nothing is sent before the receiver has said that it is ready.
        That word would otherwise queue behind all that it sends to the same member."""

    def actions(self) -> Iterator[Action[T]]:
        for kind in (Kind.ROTATING_IN,) * self.moves.block + (Kind.STAYING_IN,) * self.moves.rows:
            yield from self.leave(0, kind)
        if self.moves.block:
            yield from self.arrive(0, Kind.ROTATING_IN)
        for action in self.ring:
            if isinstance(action, Compute):
                yield from self.compute(action)
            elif isinstance(action, (Send, Recv)):
                yield replace(action, peer=self.placement.rank(action.peer, self.member))
            else:
                yield action
        step = self.ring[-1].step
        if self.moves.gradients:
            yield from self.leave(step, Kind.ROTATING_OUT)
        for kind in (Kind.STAYING_OUT,) + (Kind.ROTATING_OUT,) * self.moves.gradients:
            yield from self.arrive(step, kind)

    def compute(self, action: Compute) -> Iterator[Action[T]]:
        entering, leaving = action.step == 0 and self.moves.rows, action.step in self.leaving
        if self.by_part and (entering or leaving):
            yield from self.compute_by_part(action, entering, leaving)
            return
        if entering:
            yield from self.arrive(action.step, Kind.STAYING_IN)
        yield action
        if leaving:
            yield from self.leave(action.step, Kind.STAYING_OUT)

    def compute_by_part(self, action: Compute, entering: bool, leaving: bool) -> Iterator[Action[T]]:
        for shifts in ([0], *self.shifts) if entering else (*self.shifts, [0]):
            for shift in shifts:
                if entering:
                    yield from self.arrive_from(action.step, Kind.STAYING_IN, shift)
                yield replace(action, part=self.after(-shift))
            if leaving and shifts != [0]:
                yield from self.exchange(action.step, Kind.STAYING_OUT, shifts)

    def leave(self, step: int, kind: Kind) -> Iterator[Action[T]]:
        """Exchange with all other members."""
        for shifts in self.shifts:
            yield from self.exchange(step, kind, shifts)

    def arrive(self, step: int, kind: Kind) -> Iterator[Action[T]]:
        """Wait for the shares of all members, and unpack them."""
        for shift in (0, *chain.from_iterable(self.shifts)):
            yield from self.arrive_from(step, kind, shift)

    def exchange(self, step: int, kind: Kind, shifts: Sequence[int]) -> Iterator[Action[T]]:
        """Send to the members at these shifts, receive from the members at the opposite ones."""
        rows = self.leaving[step] if kind == Kind.STAYING_OUT else None  # of a send, for the cost model
        for member in map(self.after, shifts):
            yield Pack(step, kind, f"{kind}.to{member}", member)
        for shift in shifts:
            source, channel = self.after(-shift), self.channel(kind, shift)
            self.posted.add(channel)
            yield Recv(step, channel, f"{kind}.from{source}", self.peer(source))
        for shift in shifts:
            member, channel = self.after(shift), self.channel(kind, shift)
            yield Send(step, channel, f"{kind}.to{member}", self.peer(member), rows)

    def arrive_from(self, step: int, kind: Kind, shift: int) -> Iterator[Action[T]]:
        """Wait for the share of the member at the opposite shift, and unpack it."""
        source, channel = self.after(-shift), self.channel(kind, shift)
        if channel in self.posted:
            self.posted.remove(channel)
            yield Wait(step, channel)
        yield Unpack(step, kind, f"{kind}.from{source}", source)

    def peer(self, member: int) -> int:
        """Return the rank of a member."""
        return self.placement.rank(self.ring_rank, member)

    def after(self, shift: int) -> int:
        """Return the member at a shift."""
        return (self.member + shift) % self.size

    def channel(self, kind: Kind, shift: int) -> Channel:
        """Return the channel of messages between the members at a shift."""
        return Channel(Link.HEADS, kind, min(shift, self.size - shift))
