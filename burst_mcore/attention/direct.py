"""The program of a position that gets what it reads from its owner, and sends gradients straight back.

Where masks leave little to read, this moves least: every row to its readers and to nobody else, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from burst_mcore.attention.actions import (
    DATA,
    GRADIENT,
    HOME,
    HOME_SUM,
    PARTIAL,
    SUM,
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Program,
    Recv,
    Return,
    Send,
    Wait,
)

Meet = Callable[[int, int], bool]
"""(position that owns a bundle, another) -> whether the other reads any of it."""


def direct(position: int, size: int, meet: Meet, *, gradients: bool) -> Program:
    """Every row that is read comes while what was read before is computed; its gradient goes back meanwhile.

    Bundles are read in the order of the distance to their owners, so that at any time all positions send the
    same way. Positions that are not read, or do not read, are passed over.
    """
    return tuple(_Position(position, size, meet, gradients).actions())


class _Position:
    def __init__(self, position: int, size: int, meet: Meet, gradients: bool) -> None:
        self.position, self.size, self.gradients = position, size, gradients
        self.reads = [0, *(t for t in range(1, size) if meet(self.before(t), position))]
        """Distances of the owners whose bundles are read; its own first."""
        self.read_by = {t for t in range(1, size) if meet(position, self.after(t))}
        """Distances of the readers."""
        self.coming: list[tuple[int, str | None]] = []
        """Gradients under way: (distance, buffer of what comes back)."""

    def before(self, t: int) -> int:
        return (self.position - t) % self.size

    def after(self, t: int) -> int:
        return (self.position + t) % self.size

    def actions(self) -> Iterator[Action]:
        following = [*self.reads[1:], self.size - 1]
        for i, (t, upto) in enumerate(zip(self.reads, following, strict=True)):
            hops = [u for u in range(t + 1, upto + 1) if u in self.read_by or u in self.reads]
            for u in hops:
                yield from self.fetch(t, u, f"{DATA}{(i + 1) % 2}")
            yield Compute(t, self.before(t), f"{DATA}{i % 2}" if t else HOME)
            if self.gradients:
                yield from self.give_back(i, t)
            for u in hops:
                yield Wait(t, Channel("direct", DATA, u))
                if self.gradients and u not in self.reads:
                    yield from self.exchange(t, u, None)
        if self.gradients:
            yield from self.take_in(self.size)
            yield Return(self.size, HOME_SUM)

    def fetch(self, step: int, u: int, into: str) -> Iterator[Action]:
        """Start the messages over distance u."""
        channel = Channel("direct", DATA, u)
        if u in self.reads:
            yield Recv(step, channel, into, self.before(u))
        if u in self.read_by:
            yield Send(step, channel, HOME, self.after(u))

    def give_back(self, i: int, t: int) -> Iterator[Action]:
        """Sum the gradients of the bundle just computed, and send them home."""
        if t == 0:
            yield Accumulate(t, self.position, HOME_SUM, first=True)
            return
        share = f"{SUM}{i % 2}"
        yield Accumulate(t, self.before(t), share, first=True)
        yield from self.take_in(t)
        yield from self.exchange(t, t, share)

    def exchange(self, step: int, u: int, share: str | None) -> Iterator[Action]:
        """Start the gradients' messages over distance u."""
        channel, comes = Channel("direct", GRADIENT, u), None
        if u in self.read_by:
            comes = f"{PARTIAL}{len(self.coming)}"
            yield Recv(step, channel, comes, self.after(u))
        if share is not None:
            yield Send(step, channel, share, self.before(u))
        self.coming.append((u, comes))

    def take_in(self, step: int) -> Iterator[Action]:
        """Add what has come back."""
        for u, comes in self.coming:
            yield Wait(step, Channel("direct", GRADIENT, u))
            if comes is not None:
                yield Add(step, HOME_SUM, comes)
        self.coming = []
