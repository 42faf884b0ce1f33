"""The number of rows in each message of the ring, for all ring ranks at once: to simulate passes.

The program of every ring rank is ring rank 0's, with ranks shifted (`moved`). So each message is looked up
once, for ring rank 0. The answer is an entry of a table: by owner, the rows of its block, or of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.schedule.carried import Carried, Itinerary, Messages, elsewhere
from burst_mcore.attention.schedule.ring import visits
from burst_mcore.attention.schedule.route import Route, itinerary


class RowCounts:
    """Tables of the rows that each message of a pass carries, by owner.

    A caller counts the ring ranks of a mirrored ring from the other end; these tables do not.
    """

    def __init__(self, plan: Plan, route: Route, *, of_queries: bool) -> None:
        self.route, self._reading = route, plan.reading(of_queries=of_queries)
        self._itinerary: Itinerary | None = None
        if not route.direct:
            self._itinerary = itinerary(plan, route.nodes, route.intra, route.turn, of_queries)

    def at_distance(self, distance: int) -> tuple[Tensor]:
        """Return the rows that the ring rank at a distance from their owner reads, [owners]."""
        read = self._reading.read
        reader = (self._reading.owner + (-distance if self.route.mirrored else distance)) % len(read)
        return (self._summed((~read.gather(0, reader[None])).long(), 2)[0],)

    def last_steps(self, *, gradients: bool) -> Tensor:
        """Return the step at which each ring rank computes last."""
        nodes, intra = self.route.nodes, self.route.intra
        order = [i * intra + j for i, places in visits(nodes, intra, gradients=gradients) for j in places]
        ranks = torch.arange(nodes * intra)
        m, l = ranks // intra, ranks % intra  # noqa: E741
        where = (m - m[:, None]) % nodes * intra + (l - l[:, None]) % intra  # [owner, reader]: they meet
        meets = self._reading.meets.flip(0, 1) if self.route.mirrored else self._reading.meets
        return (meets * torch.tensor(order).argsort()[where]).amax(0)

    def by_place(self) -> tuple[Tensor, Tensor]:
        """Return rows that other ranks read from each place on, and up to it, [rounds, places, owners]."""
        assert self._itinerary is not None
        it = self._itinerary
        return self._along(it.first, it.last, it.intra)

    def by_round(self) -> tuple[Tensor, Tensor]:
        """Return the rows that others read from each round on, and up to it, [1, rounds, owners]."""
        assert self._itinerary is not None
        it = self._itinerary
        return self._along(it.first_round[:, None], it.last_round[:, None], it.nodes)

    def _along(self, first: Tensor, last: Tensor, places: int) -> tuple[Tensor, Tensor]:
        """Return the rows that are read from each place on, and up to it, [paths, places, owners].

        first, last: [segments, paths], the first and the last place of a reader; `places` and -1 if none.
        """
        paths = first.shape[1]
        start = torch.arange(paths) * (places + 1)  # of a path, in a table [paths x (places + 1), owners]
        ends, starts = (
            self._summed((start + place).T, paths * (places + 1)).view(paths, places + 1, -1)
            for place in (last + 1, first)
        )
        return ends[:, 1:].flip(1).cumsum(1).flip(1), starts[:, :-1].cumsum(1)

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
    """The number of rows of one message, for all ring ranks."""

    rows: Tensor
    """[owners, passes]."""
    owner: int


class OfAll(Messages[Counted]):
    """Messages of all ring ranks at once, as numbers of rows (`Counted`), in the program of ring rank 0.

    An `owner` stands for the counterpart of each ring rank: see `moved`.
    """

    def __init__(self, passes: Sequence[RowCounts]) -> None:
        self._passes = passes
        self._between: dict[int, Tensor] = {}
        """By distance of owner and reader."""

    def _tables(self, tables_of: Callable[[RowCounts], Iterable[Tensor]]) -> list[Tensor]:
        """Return tables of all passes, [..., owners, passes], with `UNSENT` for messages without rows."""
        by_pass = [
            [table.flip(-1) if counts.route.mirrored else table for table in tables_of(counts)]
            for counts in self._passes
        ]
        tables = [torch.stack(of_passes, -1) for of_passes in zip(*by_pass, strict=True)]
        return [table.masked_fill_(table == 0, UNSENT) for table in tables]

    @cached_property
    def _by_place(self) -> list[Tensor]:
        return self._tables(RowCounts.by_place)

    @cached_property
    def _by_round(self) -> list[Tensor]:
        return self._tables(RowCounts.by_round)

    def between(self, owner: int, reader: int) -> Carried[Counted]:
        distance = reader - owner
        if distance not in self._between:
            (self._between[distance],) = self._tables(lambda counts: counts.at_distance(distance))
        return (Counted(self._between[distance], owner),)

    def together(self, rows: Carried[Counted], others: Carried[Counted]) -> Carried[Counted]:
        return others

    def read_from(self, owner: int, i: int, j: int) -> Carried[Counted]:
        return (Counted(self._by_place[0][i, j], owner),)

    def read_from_round(self, owner: int, i: int) -> Carried[Counted]:
        return (Counted(self._by_round[0][0, i], owner),)

    def read_until(self, owner: int, i: int, j: int) -> Carried[Counted]:
        return (Counted(self._by_place[1][i, j], owner),) if elsewhere(i, j) else ()

    def read_until_round(self, owner: int, i: int) -> Carried[Counted]:
        return (Counted(self._by_round[1][0, i], owner),) if i > 0 else ()

    def remote(self, owner: int) -> Carried[Counted]:
        return self.read_from_round(owner, 0)  # the owner's node is among the readers in round 0


@lru_cache(maxsize=1024)
def moved(nodes: int, intra: int, ring_rank: int) -> Tensor:
    """Return what ring rank 0's partner `ring_rank` is for each ring rank, int64 [ring ranks]. Cached."""
    node, place = divmod(ring_rank, intra)
    of_node, of_place = torch.arange(nodes)[:, None] + node, torch.arange(intra) + place
    return (of_node % nodes * intra + of_place % intra).flatten()
