"""The program of a direct (all-to-all P2P) exchange: owners send rows to their readers, without a ring.

Every row goes once to each of its readers, and gradients go straight back. Under sparse masks no ring moves
fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from burst_mcore.attention.schedule.actions import (
    HOME,
    HOME_SUM,
    OWN_SHARE,
    PARTIAL,
    SUM,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Kind,
    Link,
    Program,
    Recv,
    Return,
    Send,
    Wait,
)
from burst_mcore.attention.schedule.carried import Carried, Messages, T, nothing


def direct(ring_rank: int, size: int, *, gradients: bool, messages: Messages[T] = Messages()) -> Program[T]:
    """Return a program in which rows arrive and gradients leave while earlier rows are computed.

    Blocks are read in the order of the distance to their owners, so that at any time all ring ranks send in
    the same direction. Pairs of ring ranks without common work exchange no message.
    """
    return tuple(_DirectWriter(ring_rank, size, messages, gradients).actions())


class _DirectWriter(Generic[T]):
    def __init__(self, ring_rank: int, size: int, messages: Messages[T], gradients: bool) -> None:
        self.ring_rank, self.size, self.messages, self.gradients = ring_rank, size, messages, gradients
        owners, readers = messages.owners(size), messages.readers(size)
        self.reads = [0, *sorted(t for owner in owners if (t := (ring_rank - owner) % size))]
        """Distances of the owners of the blocks that are read; 0, the ring rank itself, comes first."""
        self.read_by = {t for reader in readers if (t := (reader - ring_rank) % size)}
        """Distances of the readers."""
        self.coming: list[tuple[int, str | None]] = []
        """Gradients in flight: (distance, receive buffer)."""
        self.summed: Carried[T] = ()
        """The rows of the sum of other ranks' gradients."""

    def before(self, t: int) -> int:
        return (self.ring_rank - t) % self.size

    def after(self, t: int) -> int:
        return (self.ring_rank + t) % self.size

    def fetched(self, t: int) -> Carried[T]:
        """Return the rows that the ring rank reads from distance t."""
        return self.messages.between(self.before(t), self.ring_rank)

    def remote(self, t: int) -> Carried[T]:
        """Return the rows that the ring rank at distance t reads."""
        return self.messages.between(self.ring_rank, self.after(t))

    def actions(self) -> Iterator[Action[T]]:
        following = [*self.reads[1:], self.size - 1]
        distances = sorted({*self.reads[1:], *self.read_by})
        for i, (t, upto) in enumerate(zip(self.reads, following, strict=True)):
            messages = [u for u in distances if t < u <= upto]  # in flight during the compute of distance t
            for u in messages:
                yield from self.fetch(t, u, f"{Kind.DATA}{(i + 1) % 2}")  # two buffers: computed, arriving
            yield Compute(t, self.before(t), f"{Kind.DATA}{i % 2}" if t else HOME)
            if self.gradients:
                yield from self.give_back(i, t)
            for u in messages:
                yield Wait(t, Channel(Link.DIRECT, Kind.DATA, u))
                if self.gradients and u not in self.reads:
                    yield from self.exchange(t, u, None)
        if self.gradients:
            yield from self.take_in(self.size)
            has_local, has_remote = self.messages.reads(self.ring_rank), not nothing(self.summed)
            yield Return(self.size, (OWN_SHARE,) * has_local + (HOME_SUM,) * has_remote)

    def fetch(self, step: int, u: int, into: str) -> Iterator[Action[T]]:
        """Start the messages of rows over distance u."""
        channel = Channel(Link.DIRECT, Kind.DATA, u)
        if u in self.reads:
            yield Recv(step, channel, into, self.before(u), self.fetched(u))
        if u in self.read_by:
            yield Send(step, channel, HOME, self.after(u), self.remote(u))

    def give_back(self, i: int, t: int) -> Iterator[Action[T]]:
        """Sum the gradients of the block just computed, and send them to the owner."""
        if t == 0:
            if self.messages.reads(self.ring_rank):
                yield Accumulate(t, self.ring_rank, OWN_SHARE, first=True, rows=self.fetched(0))
            return
        share = f"{SUM}{i % 2}"
        yield Accumulate(t, self.before(t), share, first=True, rows=self.fetched(t))
        yield from self.take_in(t)
        yield from self.exchange(t, t, share)

    def exchange(self, step: int, u: int, share: str | None) -> Iterator[Action[T]]:
        """Start the messages of gradients over distance u."""
        channel, comes = Channel(Link.DIRECT, Kind.GRADIENT, u), None
        if u in self.read_by:
            comes = f"{PARTIAL}{len(self.coming)}"
            yield Recv(step, channel, comes, self.after(u), self.remote(u))
        if share is not None:
            yield Send(step, channel, share, self.before(u), self.fetched(u))
        self.coming.append((u, comes))

    def take_in(self, step: int) -> Iterator[Action[T]]:
        """Add the received gradients of this rank's block."""
        for u, comes in self.coming:
            yield Wait(step, Channel(Link.DIRECT, Kind.GRADIENT, u))
            if comes is not None:
                first, self.summed = nothing(self.summed), self.messages.together(self.summed, self.remote(u))
                yield Add(step, HOME_SUM, comes, first=first, rows=self.summed)
        self.coming = []
