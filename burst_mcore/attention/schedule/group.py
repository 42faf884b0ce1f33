"""Exchanges in a group of ranks: each member sends a share to every other, two members at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic

from burst_mcore.attention.schedule.actions import Action, Channel, Kind, Link, Pack, Recv, Send, Unpack, Wait
from burst_mcore.attention.schedule.carried import Carried, T, nothing


class Group(ABC, Generic[T]):
    """The exchanges of one member of a group, as actions."""

    LINK: ClassVar[Link]

    def __init__(self, member: int, size: int) -> None:
        self.member, self.size = member, size
        self.posted: set[Channel] = set()
        """Channels with something to wait for."""
        self.shifts = [sorted({shift, size - shift}) for shift in range(1, size // 2 + 1)]
        """Shifts s: send to member m + s, receive from member m - s. The two shifts between the same two
        members start together. On gloo nothing is sent before the receiver has said that it is ready.
        That word would otherwise queue behind all that it sends to the same member."""
        self.others = [shift for pair in self.shifts for shift in pair]

    @abstractmethod
    def peer(self, member: int) -> int:
        """Return the number of a member in the program: its rank, or its position."""

    def sends(self, kind: Kind, member: int) -> Carried[T]:
        """Return the rows of the share for a member; none if it needs no share."""
        return None

    def receives(self, kind: Kind, member: int) -> Carried[T]:
        """Return the rows of the share that comes from a member."""
        return None

    def posted_rows(self, kind: Kind, rows: Carried[T], step: int) -> Carried[T]:
        """Return the rows that the cost model counts for a send of `rows`."""
        return rows

    def leave(self, step: int, kind: Kind) -> Iterator[Action[T]]:
        """Exchange with all other members."""
        for shifts in self.shifts:
            yield from self.exchange(step, kind, shifts)

    def arrive(self, step: int, kind: Kind) -> Iterator[Action[T]]:
        """Wait for the shares of all members, and unpack them."""
        for shift in (0, *self.others):
            yield from self.arrive_from(step, kind, shift)

    def exchange(self, step: int, kind: Kind, shifts: Sequence[int]) -> Iterator[Action[T]]:
        """Send to the members at these shifts, receive from the members at the opposite ones."""
        to = [member for shift in shifts if not nothing(self.sends(kind, member := self.after(shift)))]
        for member in to:
            yield Pack(step, kind, f"{kind}.to{member}", member, self.sends(kind, member))
        for shift in shifts:
            source, channel = self.after(-shift), self.channel(kind, shift)
            rows = self.receives(kind, source)
            if not nothing(rows):
                self.posted.add(channel)
                yield Recv(step, channel, f"{kind}.from{source}", self.peer(source), rows)
        for shift in shifts:
            member, channel = self.after(shift), self.channel(kind, shift)
            if member in to:
                self.posted.add(channel)
                rows = self.posted_rows(kind, self.sends(kind, member), step)
                yield Send(step, channel, f"{kind}.to{member}", self.peer(member), rows)

    def arrive_from(self, step: int, kind: Kind, shift: int) -> Iterator[Action[T]]:
        """Wait for the share of the member at the opposite shift, and unpack it."""
        source, channel = self.after(-shift), self.channel(kind, shift)
        rows = self.receives(kind, source)
        if channel in self.posted:
            self.posted.remove(channel)
            yield Wait(step, channel)
        if not nothing(rows):
            yield Unpack(step, kind, f"{kind}.from{source}", source, rows)

    def after(self, shift: int) -> int:
        """Return the member at a shift."""
        return (self.member + shift) % self.size

    def channel(self, kind: Kind, shift: int) -> Channel:
        """Return the channel of messages between the members at a shift."""
        return Channel(self.LINK, kind, min(shift, self.size - shift))
