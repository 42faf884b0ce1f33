"""The number of rows in each message of the ring, for all ring ranks at once: to simulate passes.

The program of every ring rank is ring rank 0's, with ranks shifted. So each message is looked up once, for
ring rank 0. The answer is a column of a table: by owner, the rows of its block, or of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.reading import Reading
from burst_mcore.attention.schedule.carried import Carried, Itinerary, Messages, elsewhere
from burst_mcore.attention.schedule.ring import visits


class RowCounts:
    """Tables of the rows that each message of a pass carries, by owner.

    Args:
        reading: who reads which rows.
        itinerary: where on a ring rows are read; None for a direct exchange.
        mirrored: ring ranks are counted from the other end.
    """

    def __init__(self, reading: Reading, itinerary: Itinerary | None, *, mirrored: bool) -> None:
        self._reading, self._itinerary, self._mirrored = reading, itinerary, mirrored

    def at_distance(self, distance: int) -> Tensor:
        """Return the rows that the ring rank at a distance from their owner reads, [owners]."""
        read = self._reading.read
        reader = (self._reading.owner + (-distance if self._mirrored else distance)) % len(read)
        unread = ~read.gather(0, reader[None])
        return self._turned(self._summed(unread.long(), 2)[0], -1)

    def last_steps(self, nodes: int, intra: int, *, gradients: bool) -> Tensor:
        """Return the step at which each ring rank computes last."""
        order = [i * intra + j for i, places in visits(nodes, intra, gradients=gradients) for j in places]
        ranks = torch.arange(nodes * intra)
        m, l = ranks // intra, ranks % intra  # noqa: E741
        where = (m - m[:, None]) % nodes * intra + (l - l[:, None]) % intra  # [owner, reader]: they meet
        return (self._turned(self._reading.meets, 0, 1) * torch.tensor(order).argsort()[where]).amax(0)

    def by_place(self) -> tuple[Tensor, Tensor]:
        """Return rows that other ranks read from each place on, and up to it, [rounds, places, owners]."""
        assert self._itinerary is not None
        key = "by place", self._mirrored
        if key not in self._itinerary.cache:
            self._itinerary.cache[key] = self._counted_by_place(self._itinerary)
        return self._itinerary.cache[key]

    def _counted_by_place(self, itinerary: Itinerary) -> tuple[Tensor, Tensor]:
        places = itinerary.intra + 1
        row = torch.arange(itinerary.nodes) * places  # of a round, in a table [rounds x places, owners]
        shape = itinerary.nodes, places, -1
        last = self._summed((row + itinerary.last + 1).T, itinerary.nodes * places).view(shape)
        first = self._summed((row + itinerary.first).T, itinerary.nodes * places).view(shape)
        ahead = last[:, 1:].flip(1).cumsum(1).flip(1)  # the first column has rows that no rank reads
        return self._turned(ahead, -1), self._turned(first[:, :-1].cumsum(1), -1)

    def by_round(self) -> tuple[Tensor, Tensor]:
        """Return the rows that other nodes read from each round on, and up to it, [rounds, owners]."""
        assert self._itinerary is not None
        last = self._summed((self._itinerary.last_round + 1)[None], self._itinerary.nodes + 1)[1:]
        first = self._summed(self._itinerary.first_round[None], self._itinerary.nodes + 1)[:-1]
        ahead = last.flip(0).cumsum(0).flip(0)
        return self._turned(ahead, -1), self._turned(first.cumsum(0), -1)

    def remote(self) -> Tensor:
        """Return the rows that other ranks read, [owners]."""
        assert self._itinerary is not None
        return self._turned(self._summed((~self._itinerary.remote).long()[None], 2)[0], -1)

    def _turned(self, x: Tensor, *ring_size: int) -> Tensor:
        return x.flip(*ring_size) if self._mirrored else x

    def _summed(self, places: Tensor, size: int) -> Tensor:
        """Return the rows of segments, summed by place and owner; places: [lists of segments]."""
        rows = torch.zeros(size * self._reading.size, dtype=torch.float32)
        length = self._reading.length.float()
        for place in places:
            rows.index_add_(0, place * self._reading.size + self._reading.owner, length)
        return rows.view(size, -1)


UNSENT = -torch.inf
"""The number of rows of an empty message. They take -inf seconds, so the message ends before every clock."""


class Counted(NamedTuple):
    """The number of rows of one message, for all ring ranks: a place in a table."""

    table: Tensor
    """[entries, owners, passes]."""
    entry: int
    owner: int


class OfAll(Messages[Counted]):
    """Messages of all ring ranks at once, as numbers of rows (`Counted`), in the program of ring rank 0.

    An `owner` stands for the counterpart of each ring rank: see `MovedPrograms`.
    """

    def __init__(self, passes: Sequence[RowCounts]) -> None:
        self._passes = passes
        self._between: dict[int, Tensor] = {}
        """By distance of owner and reader."""

    @cached_property
    def _by_place(self) -> tuple[Tensor, ...]:
        pairs = zip(*(counts.by_place() for counts in self._passes), strict=True)
        tables = [torch.stack(pair, -1) for pair in pairs]
        self._places = tables[0].shape[1]
        return tuple(_or_unsent(table.flatten(0, 1)) for table in tables)

    @cached_property
    def _by_round(self) -> tuple[Tensor, ...]:
        pairs = zip(*(counts.by_round() for counts in self._passes), strict=True)
        return tuple(_or_unsent(torch.stack(pair, -1)) for pair in pairs)

    @cached_property
    def _remote(self) -> Tensor:
        return _or_unsent(torch.stack([counts.remote() for counts in self._passes], -1)[None])

    def between(self, owner: int, reader: int) -> Carried[Counted]:
        distance = reader - owner
        if distance not in self._between:
            rows = [counts.at_distance(distance) for counts in self._passes]
            self._between[distance] = _or_unsent(torch.stack(rows, -1)[None])
        return (Counted(self._between[distance], 0, owner),)

    def together(self, rows: Carried[Counted], others: Carried[Counted]) -> Carried[Counted]:
        return others

    def read_from(self, owner: int, i: int, j: int) -> Carried[Counted]:
        table = self._by_place[0]
        return (Counted(table, i * self._places + j, owner),)

    def read_from_round(self, owner: int, i: int) -> Carried[Counted]:
        return (Counted(self._by_round[0], i, owner),)

    def read_until(self, owner: int, i: int, j: int) -> Carried[Counted]:
        table = self._by_place[1]
        return (Counted(table, i * self._places + j, owner),) if elsewhere(i, j) else ()

    def read_until_round(self, owner: int, i: int) -> Carried[Counted]:
        return (Counted(self._by_round[1], i, owner),) if i > 0 else ()

    def remote(self, owner: int) -> Carried[Counted]:
        return (Counted(self._remote, 0, owner),)


def _or_unsent(rows: Tensor) -> Tensor:
    return rows.masked_fill_(rows == 0, UNSENT)


class MovedPrograms:
    """Programs of all ring ranks, as shifts of ring rank 0's: partner p becomes partner `to(p)[q]` of q."""

    def __init__(self, nodes: int, intra: int) -> None:
        self._nodes, self._intra = nodes, intra
        self._twice: dict[int, Tensor] = {}

    def to(self, ring_rank: int) -> Tensor:
        """Return int64 [ring ranks]: a view, since all moves over as many nodes lie in one table."""
        m, l = divmod(ring_rank, self._intra)  # noqa: E741
        size = self._nodes * self._intra
        if self._nodes == 1:
            m, l = l, 0  # noqa: E741  # a shift within one node is one over nodes of one rank
            return self._of_local(0, 1, size)[m : m + size]
        return self._of_local(l, self._intra, self._nodes)[m * self._intra :][:size]

    def _of_local(self, l: int, intra: int, nodes: int) -> Tensor:  # noqa: E741
        """Return every ring rank moved by `l` within its node, twice over."""
        if l not in self._twice:
            once = torch.arange(nodes)[:, None] * intra + (torch.arange(intra) + l) % intra
            self._twice[l] = once.flatten().repeat(2)
        return self._twice[l]


moved = lru_cache(maxsize=64)(MovedPrograms)
"""The shifts of rings of nodes x intra ring ranks. Cached."""
