"""The program of a mesh: rings side by side, and the exchange of staying rows along the columns between them.

Positions form `rings` rings. Position (i, r), place r of ring i, has the number i x (places of a ring) + r. A
column is one place of all rings. Every position attends with the staying rows of its whole column to the
bundles of its own ring. So each pair meets once: rows of (i', r) meet the bundle of (i, r') at (i, r). With
one ring this is the ring; with rings of one place every rank holds all rows that stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic

from burst_mcore.attention.geometry.plan import Plan, cached_on_plan
from burst_mcore.attention.geometry.reading import Reading
from burst_mcore.attention.geometry.rows import union
from burst_mcore.attention.schedule.actions import (
    Accumulate,
    Action,
    Compute,
    Kind,
    Link,
    Program,
    Recv,
    Send,
)
from burst_mcore.attention.schedule.carried import Carried, T
from burst_mcore.attention.schedule.group import Group


class Needs(ABC, Generic[T]):
    """The staying rows that the positions of a column need of each other."""

    def __init__(self, places: int) -> None:
        self.places = places

    @abstractmethod
    def needed(self, owner: int, reader: int) -> Carried[T]:
        """Return the staying rows of one position that another of its column needs."""

    def meet(self, resident: int, source: int) -> bool:
        """Return whether staying rows of `resident` meet the bundle of `source`."""
        return True


class RowsOfColumn(Needs[range]):
    """The rows themselves, by a plan; without a plan, every row."""

    def __init__(self, places: int, plan: Plan | None, *, of_queries: bool) -> None:
        super().__init__(places)
        self.plan, self.of_queries = plan, of_queries

    def needed(self, owner: int, reader: int) -> Carried:
        if self.plan is None or owner == reader:
            return None
        return staying_rows(self.plan, self.places, owner, reader, not self.of_queries)

    def meet(self, resident: int, source: int) -> bool:
        plan = self.plan
        return plan is None or bool(plan.reading(of_queries=self.of_queries).meets[source, resident])


@cached_on_plan
def staying_rows(plan: Plan, places: int, owner: int, reader: int, of_queries: bool) -> Carried:
    """Return the staying rows of `owner` that meet a bundle of the ring of `reader`."""
    ring, reading = reader // places * places, plan.reading(of_queries=of_queries)
    rows = union([span for s in range(ring, ring + places) for span in reading.needed(owner, s)])
    return None if rows == (range(reading.rows),) else rows


@cached_on_plan
def reading_on_ring(plan: Plan, rings: int, ring: int, of_queries: bool) -> Reading:
    """Return who reads which rows on one ring of a mesh: a place reads for its whole column."""
    whole = reading_of_columns(plan, rings, of_queries)
    places = whole.size // rings
    own = whole.owner // places == ring  # position = ring x places + place
    owner, first, length = whole.owner[own] - ring * places, whole.first[own], whole.length[own]
    return Reading(places, whole.rows, owner, first, length, whole.read[:, own])


@cached_on_plan
def reading_of_columns(plan: Plan, rings: int, of_queries: bool) -> Reading:
    """Return which columns of a mesh read which rows, of all rings."""
    whole = plan.reading(of_queries=of_queries)
    return whole.together(whole.size // rings, by_ring=False)


def with_columns(ring: Program[T], position: int, rings: int, column: Needs[T], *, early: bool) -> Program[T]:
    """Put the exchanges along a column around the program of a place on its ring.

    The staying rows leave first. In the first step they are computed as they come, the own rows first. In the
    ring's last step the shares of others leave, and the own rows come last. Where a mask spares a position
    that step, its shares leave then all the same: a column exchanges them together.

    Args:
        ring: the program of the position's place, between places of its ring.
        position: the position of the mesh.
        rings: the number of rings.
        column: the rows that the position's column exchanges.
        early: let shares leave in the last step; else after the ring.
    """
    return tuple(_Member(ring, position, rings, column, early).actions())


class _Member(Group[T]):
    LINK = Link.MESH

    def __init__(self, ring: Program[T], position: int, rings: int, column: Needs[T], early: bool) -> None:
        super().__init__(position // column.places, rings)
        self.ring, self.position, self.column, self.early = ring, position, column, early
        self.first = position - position % column.places
        """The first position of the own ring."""
        self.last = column.places - 1
        """The ring's last step."""

    def actions(self) -> Iterator[Action[T]]:
        yield from self.leave(0, Kind.RESIDENT)
        left = False
        for action in self.ring:
            leaving = self.early and not left and action.step >= self.last
            left |= leaving
            if isinstance(action, Compute):
                yield from self.compute(replace(action, source=self.first + action.source), leaving)
                continue
            if leaving:
                yield from self.leave(self.last, Kind.SHARE)
            if isinstance(action, (Send, Recv)):
                yield replace(action, peer=self.first + action.peer)
            elif isinstance(action, Accumulate):
                yield replace(action, source=self.first + action.source)
            else:
                yield action
        if not left:
            yield from self.leave(action.step, Kind.SHARE)
        yield from self.arrive(action.step, Kind.SHARE)

    def compute(self, action: Compute, leaving: bool) -> Iterator[Action[T]]:
        entering = action.step == 0
        # Own rows need no message: first while others' rows arrive, last while others' shares leave.
        for shifts in (*self.shifts, [0]) if leaving and not entering else ([0], *self.shifts):
            for shift in shifts:
                if entering and shift:
                    yield from self.arrive_from(action.step, Kind.RESIDENT, shift)
                resident = self.peer(self.after(-shift))
                if self.column.meet(resident, action.source) or resident == action.source:
                    yield replace(action, resident=resident)
            if leaving and shifts != [0]:
                yield from self.exchange(action.step, Kind.SHARE, shifts)

    def arrive(self, step: int, kind: Kind) -> Iterator[Action[T]]:
        for shift in self.others:
            yield from self.arrive_from(step, kind, shift)

    def peer(self, member: int) -> int:
        """Return the position of a member of the column."""
        return member * self.column.places + self.position % self.column.places  # ring `member`, own place

    def sends(self, kind: Kind, member: int) -> Carried[T]:
        return self._rows(member, outward=kind == Kind.RESIDENT)

    def receives(self, kind: Kind, member: int) -> Carried[T]:
        return self._rows(member, outward=kind == Kind.SHARE)

    def _rows(self, member: int, *, outward: bool) -> Carried[T]:
        """Return the own rows that a member needs (`outward`), or those of the member that this one needs."""
        other = self.peer(member)
        pair = (self.position, other) if outward else (other, self.position)
        return self.column.needed(*pair)
