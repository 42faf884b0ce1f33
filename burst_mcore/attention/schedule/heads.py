"""Shared heads: who attends with which, and the all-to-all of a head group around its ring's program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.schedule.actions import Action, Compute, Kind, Link, Program, Recv, Send
from burst_mcore.attention.schedule.carried import Carried, T
from burst_mcore.attention.schedule.group import Group


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
    """Which bundles, rows and gradients a pass moves."""

    title: str
    gradients: bool
    """Gradients follow the bundle."""
    bundle: bool
    """The travelling bundle first comes through the head group."""
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
    on_mesh: bool = False,
) -> Program[T]:
    """Put the all-to-all of a head group around the ring of the position that its members share.

    The travelling bundle comes first, in whole, so that the ring can start. The rows that stay come from two
    members at a time and are computed as they come (own first), while the ring makes its first hop. In the
    last step the rows are computed member by member (own last). The results of two members leave for them
    while the next are computed. The gradient that followed the bundle leaves in whole, at the very end. On a
    mesh other ranks need the rows that stay, too: all come first, and the results leave at the end.

    Args:
        ring: the program of the position, between positions.
        rank: this rank.
        placement: the ranks of each head group.
        moves: the bundles, rows and gradients of the pass.
        by_part: compute the first and last step member by member; else all rows at once.
        leaving: the steps after which results leave, and how many rows of them; default the last, all.
        on_mesh: `ring` is a program of a mesh.
    """
    if leaving is None:
        leaving = {max(action.step for action in ring if isinstance(action, Compute)): None}
    return tuple(_Member(ring, rank, placement, moves, by_part, leaving, on_mesh).actions())


class _Member(Group[T]):
    LINK = Link.HEADS

    def __init__(
        self,
        ring: Program[T],
        rank: int,
        placement: Placement,
        moves: Moves,
        by_part: bool,
        leaving: Mapping[int, Carried[T]],
        on_mesh: bool,
    ) -> None:
        super().__init__(placement.member(rank), placement.heads)
        self.ring, self.placement, self.moves, self.leaving = ring, placement, moves, leaving
        self.position, self.on_mesh = placement.position(rank), on_mesh
        self.by_part = by_part and not on_mesh

    def actions(self) -> Iterator[Action[T]]:
        for kind in (Kind.BUNDLE,) * self.moves.bundle + (Kind.ROWS,) * self.moves.rows:
            yield from self.leave(0, kind)
        if self.moves.bundle:
            yield from self.arrive(0, Kind.BUNDLE)
        if self.moves.rows and self.on_mesh:
            yield from self.arrive(0, Kind.ROWS)
        for action in self.ring:
            if isinstance(action, Compute) and not self.on_mesh:
                yield from self.compute(action)
            elif isinstance(action, (Send, Recv)):
                yield replace(action, peer=self.placement.rank(action.peer, self.member))
            else:
                yield action
        step = self.ring[-1].step
        if self.on_mesh:
            self.leaving = {step: None}
            yield from self.leave(step, Kind.RESULT)
        if self.moves.gradients:
            yield from self.leave(step, Kind.SUM)
        for kind in (Kind.RESULT,) + (Kind.SUM,) * self.moves.gradients:
            yield from self.arrive(step, kind)

    def compute(self, action: Compute) -> Iterator[Action[T]]:
        entering, leaving = action.step == 0 and self.moves.rows, action.step in self.leaving
        if self.by_part and (entering or leaving):
            yield from self.compute_by_part(action, entering, leaving)
            return
        if entering:
            yield from self.arrive(action.step, Kind.ROWS)
        yield action
        if leaving:
            yield from self.leave(action.step, Kind.RESULT)

    def compute_by_part(self, action: Compute, entering: bool, leaving: bool) -> Iterator[Action[T]]:
        for shifts in ([0], *self.shifts) if entering else (*self.shifts, [0]):
            for shift in shifts:
                if entering:
                    yield from self.arrive_from(action.step, Kind.ROWS, shift)
                yield replace(action, part=self.after(-shift))
            if leaving and shifts != [0]:
                yield from self.exchange(action.step, Kind.RESULT, shifts)

    def peer(self, member: int) -> int:
        return self.placement.rank(self.position, member)

    def posted_rows(self, kind: Kind, rows: Carried[T], step: int) -> Carried[T]:
        return self.leaving[step] if kind == Kind.RESULT else rows
