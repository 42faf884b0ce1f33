"""Head parallelism (Ulysses): the heads of each rank of a head group, and their all-to-all around a ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Generic, NamedTuple

from burst_mcore.attention.geometry.shard import Placement, Ranks, Shard
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
from burst_mcore.config import BurstConfig


def share_of_heads(total: int, member: int, size: int) -> range:
    """Return the heads, of `total`, of a member of a head group of `size`.

    With fewer K/V heads than members, several members have the same head.
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


def why_not_degree(degree: int, ranks: Ranks, heads: int, kv_heads: int) -> str | None:
    """Return why `degree` ranks cannot share these heads; None if they can."""
    if ranks.size % degree:
        return f"it does not divide the {ranks.size} ranks"
    return why_not_heads(heads, kv_heads, degree)


def legal_degrees(ranks: Ranks, heads: int, kv_heads: int) -> list[int]:
    """Return the degrees of head parallelism that ranks and heads allow."""
    return [d for d in range(1, ranks.size + 1) if why_not_degree(d, ranks, heads, kv_heads) is None]


def degrees_of(config: BurstConfig, ranks: Ranks, shard: Shard) -> tuple[int, ...]:
    """Return the degrees of head parallelism to choose from; ValueError if the configured one is illegal."""
    degree = config.head_parallel
    if not isinstance(degree, int):
        return tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    why_not = why_not_degree(degree, ranks, shard.heads, shard.kv_heads)
    if why_not is not None:
        raise ValueError(
            f"head_parallel={degree} is not legal with {shard.heads} heads, {shard.kv_heads} K/V heads and "
            f"{ranks.size} ranks, {ranks.intra} a node: {why_not}; legal: "
            f"{legal_degrees(ranks, shard.heads, shard.kv_heads)}"
        )
    return (degree,)


class Moves(NamedTuple):
    """The blocks, rows and gradients that a pass moves."""

    title: str
    gradients: bool
    """Gradients follow the block."""
    block: bool
    """The rotating block goes through the head group's all-to-all first."""
    rows: bool
    """The staying rows go through the head group's all-to-all, too."""


def with_heads(
    ring: Program[T],
    rank: int,
    placement: Placement,
    moves: Moves,
    *,
    by_part: bool,
    leaving: Mapping[int, Carried[T]] | None = None,
) -> Program[T]:
    """Put the all-to-all of a head group around the program of its ring rank.

    The rotating block comes first, in whole, so that the ring can start. The staying rows come from two
    members at a time and are computed as they come (own first), during the first ring step. In the last
    step the rows are computed member by member (own last). The results of two members are sent to them
    while the next are computed. The gradient that followed the block leaves in whole, at the very end.

    Args:
        by_part: compute the first and last step member by member; else all rows at once.
        leaving: the rows of results that are sent after each step; default all after the last step.
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
        """Channels with started messages."""
        self.shifts = [sorted({shift, size - shift}) for shift in range(1, size // 2 + 1)]
        """Shifts s: send to member m + s, receive from member m - s. The two shifts between the same two
        members start together. Gloo sends only after the receiver's ready message, which would otherwise
        queue behind the receiver's own sends to the same member."""

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
        for shifts in self.shifts:
            yield from self.exchange(step, kind, shifts)

    def arrive(self, step: int, kind: Kind) -> Iterator[Action[T]]:
        for shift in (0, *chain.from_iterable(self.shifts)):
            yield from self.arrive_from(step, kind, shift)

    def exchange(self, step: int, kind: Kind, shifts: Sequence[int]) -> Iterator[Action[T]]:
        """Send to the members at these shifts, receive from the members at the opposite shifts."""
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
        """Wait for the parcel of the member at the opposite shift, and unpack it."""
        source, channel = self.after(-shift), self.channel(kind, shift)
        if channel in self.posted:
            self.posted.remove(channel)
            yield Wait(step, channel)
        yield Unpack(step, kind, f"{kind}.from{source}", source)

    def peer(self, member: int) -> int:
        return self.placement.rank(self.ring_rank, member)

    def after(self, shift: int) -> int:
        return (self.member + shift) % self.size

    def channel(self, kind: Kind, shift: int) -> Channel:
        """Return the channel of messages between the members at a shift."""
        return Channel(Link.HEADS, kind, min(shift, self.size - shift))
