"""What each hop carries: of a bundle the rows that are read further on, of a gradient those read so far.

A bundle goes round by round: in round i it visits node i of its way, and there place after place; its owner
is at round 0, place 0. The writers of programs ask an object of this file at every hop. `Everything` says
all; `OfPosition` says which rows, for the program of one position; `OfAll` says how many, for all positions
at once, for playing them against the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from burst_mcore.attention.reading import Reading
from burst_mcore.attention.rows import Rows, union

Carried = Any
"""Rows that a message carries: `Rows`, or None for all; or how many, for each position (`Counted`)."""


def nothing(carried: Carried) -> bool:
    """Whether there is nothing to carry."""
    return isinstance(carried, tuple) and not carried


class Hops(Protocol):
    """What a position, or all, must send, receive and compute."""

    alone: bool
    """Nobody else reads the position's own bundle: its gradient stays."""

    def reads(self, owner: int) -> bool:
        """Whether the position reads the bundle of `owner`."""
        ...

    def owners(self, size: int) -> Iterable[int]:
        """Those of `size` positions whose bundles the position reads."""
        ...

    def readers(self, size: int) -> Iterable[int]:
        """Those that read the position's own bundle."""
        ...

    def between(self, owner: int, by: int) -> Carried:
        """Rows of `owner` that `by` reads."""
        ...

    def together(self, some: Carried, others: Carried) -> Carried:
        """The rows in either."""
        ...

    def ahead(self, owner: int, i: int, j: int) -> Carried:
        """Rows of `owner` that are read in round i from place j on."""
        ...

    def ahead_of_round(self, owner: int, i: int) -> Carried:
        """Rows of `owner` that are read from round i on."""
        ...

    def so_far(self, owner: int, i: int, j: int) -> Carried:
        """Rows of `owner` that are read in round i up to place j."""
        ...

    def so_far_in_rounds(self, owner: int, i: int) -> Carried:
        """Rows of `owner` that are read up to round i."""
        ...


class Everything:
    """All is read by all."""

    alone = False

    def reads(self, owner: int) -> bool:
        return True

    def owners(self, size: int) -> Iterable[int]:
        return range(size)

    def readers(self, size: int) -> Iterable[int]:
        return range(size)

    def between(self, owner: int, by: int) -> Carried:
        return None

    def together(self, some: Carried, others: Carried) -> Carried:
        return None

    def ahead(self, owner: int, i: int, j: int) -> Carried:
        return None

    def ahead_of_round(self, owner: int, i: int) -> Carried:
        return None

    def so_far(self, owner: int, i: int, j: int) -> Carried:
        return None if j >= 0 else ()

    def so_far_in_rounds(self, owner: int, i: int) -> Carried:
        return None if i >= 0 else ()


EVERYTHING = Everything()


class Itinerary:
    """For each segment of a `Reading`: where on a ring of nodes x intra it is read first and last.

    turn: 1, or -1 for the ring the other way round.

    Attributes:
        first, last: [segments, rounds]: the first and last place of a reader; `intra` and -1 if none.
        first_round, last_round: [segments]; `nodes` and -1 if none.
    """

    def __init__(self, reading: Reading, nodes: int, intra: int, turn: int) -> None:
        self.reading, self.nodes, self.intra, self.turn = reading, nodes, intra, turn
        self.kept: dict[object, tuple[Tensor, Tensor]] = {}
        """What was counted from it: see `Seen`."""
        blocks = [self._visits(owners, read) for owners, read in self._blocks()]
        self.first, self.last = (torch.cat(x) for x in zip(*blocks, strict=True))
        some, rounds = self.last >= 0, torch.arange(nodes)
        self.first_round = torch.where(some, rounds, nodes).amin(1)
        self.last_round = torch.where(some, rounds, -1).amax(1)

    def _blocks(self) -> list[tuple[Tensor, Tensor]]:
        block = max(1, 2**20 // self.reading.size)
        return list(zip(self.reading.owner.split(block), self.reading.read.split(block, dim=1), strict=True))

    def _visits(self, owners: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        m, l = owners[:, None] // self.intra, owners[:, None] % self.intra  # noqa: E741
        node = (m + self.turn * torch.arange(self.nodes)) % self.nodes
        local = (l + self.turn * torch.arange(self.intra)) % self.intra
        by = node[:, :, None] * self.intra + local[:, None, :]
        visited = read.T.gather(1, by.flatten(1)).view(by.shape).to(torch.int32)
        place = torch.arange(1, self.intra + 1, dtype=torch.int32)
        return self.intra - (visited * place.flip(0)).amax(2), (visited * place).amax(2) - 1


class OfPosition:
    """The rows, for one position."""

    def __init__(self, reading: Reading, position: int, itinerary: Itinerary | None = None) -> None:
        self._reading, self._way = reading, itinerary
        self._alone = reading.alone
        self.alone = position in self._alone
        self._meets, self._position = reading.meets, position
        self._reads: list[bool] = reading.meets[:, position].tolist()
        self._columns: dict[tuple[str, int, int], list[int]] = {}

    def reads(self, owner: int) -> bool:
        return self._reads[owner]

    def owners(self, size: int) -> Iterable[int]:
        found: list[int] = self._meets[:, self._position].nonzero().flatten().tolist()
        return found

    def readers(self, size: int) -> Iterable[int]:
        found: list[int] = self._meets[self._position].nonzero().flatten().tolist()
        return found

    def between(self, owner: int, by: int) -> Carried:
        return self._some(self._reading.needed(owner, by))

    def together(self, some: Carried, others: Carried) -> Carried:
        return None if some is None or others is None else self._some(union([*some, *others]))

    def ahead(self, owner: int, i: int, j: int) -> Carried:
        return self._rows(owner, [place >= j for place in self._places("last", owner, i)])

    def ahead_of_round(self, owner: int, i: int) -> Carried:
        return self._rows(owner, [round_ >= i for round_ in self._places("last_round", owner)])

    def so_far(self, owner: int, i: int, j: int) -> Carried:
        if owner in self._alone:  # its sum stays at home
            return ()
        return self._rows(owner, [place <= j for place in self._places("first", owner, i)])

    def so_far_in_rounds(self, owner: int, i: int) -> Carried:
        if owner in self._alone:  # its sum stays at home
            return ()
        return self._rows(owner, [round_ <= i for round_ in self._places("first_round", owner)])

    def _places(self, name: str, owner: int, i: int = 0) -> list[int]:
        """A column of the itinerary, of the owner's segments; read for a whole node at a time."""
        assert self._way is not None
        bounds, intra = self._reading.bounds, self._way.intra
        node = owner - owner % intra
        key = name, node, i
        if key not in self._columns:
            column: Tensor = getattr(self._way, name)
            column = column[bounds[node] : bounds[node + intra]]
            self._columns[key] = (column if column.dim() == 1 else column[:, i]).tolist()
        return self._columns[key][bounds[owner] - bounds[node] : bounds[owner + 1] - bounds[node]]

    def _rows(self, owner: int, which: list[bool]) -> Carried:
        if all(which):
            return None
        return self._reading.joined(owner, which) if any(which) else ()

    def _some(self, rows: Rows) -> Carried:
        return None if rows == (range(self._reading.rows),) else rows


class Seen:
    """How many rows each hop of a pass carries, by owner.

    Args:
        reading: who reads what.
        itinerary: where on its way; None for a direct exchange.
        mirrored: positions are counted from the other end.
    """

    def __init__(self, reading: Reading, itinerary: Itinerary | None, *, mirrored: bool) -> None:
        self._reading, self._way, self._mirrored = reading, itinerary, mirrored

    @property
    def between(self) -> Tensor:
        """Rows by owner and reader."""
        return self._turned(self._reading.counts.float(), 0, 1)

    def last_steps(self, nodes: int, intra: int) -> Tensor:
        """The step at which each position computes last."""
        here = torch.arange(nodes * intra)
        m, l = here // intra, here % intra  # noqa: E741
        step = (m - m[:, None]) % nodes * intra + (l - l[:, None]) % intra
        return (self._turned(self._reading.meets, 0, 1) * step).amax(0)

    def by_place(self) -> tuple[Tensor, Tensor]:
        """Rows read from each place on, and up to it, [rounds, places, owners]."""
        assert self._way is not None
        key = "by place", self._mirrored
        if key not in self._way.kept:
            self._way.kept[key] = self._counted_by_place(self._way)
        return self._way.kept[key]

    def _counted_by_place(self, way: Itinerary) -> tuple[Tensor, Tensor]:
        places = way.intra + 1
        row = torch.arange(way.nodes) * places
        last = self._summed((row + way.last + 1).T, way.nodes * places).view(way.nodes, places, -1)
        first = self._summed((row + way.first).T, way.nodes * places).view(way.nodes, places, -1)
        ahead = last[:, 1:].flip(1).cumsum(1).flip(1)  # the first column is of rows that nobody reads
        return self._turned(ahead, -1), self._turned(self._leaving(first[:, :-1].cumsum(1)), -1)

    def by_round(self) -> tuple[Tensor, Tensor]:
        """Rows read from each round on, and up to it, [rounds, owners]."""
        assert self._way is not None
        last = self._summed((self._way.last_round + 1)[None], self._way.nodes + 1)[1:]
        first = self._summed(self._way.first_round[None], self._way.nodes + 1)[:-1]
        ahead = last.flip(0).cumsum(0).flip(0)
        return self._turned(ahead, -1), self._turned(self._leaving(first.cumsum(0)), -1)

    def _turned(self, x: Tensor, *positions: int) -> Tensor:
        return x.flip(*positions) if self._mirrored else x

    def _leaving(self, rows: Tensor) -> Tensor:
        """Less the sums that stay at home."""
        rows[..., list(self._reading.alone)] = 0
        return rows

    def _summed(self, at: Tensor, size: int) -> Tensor:
        """Rows of segments [lists of segments], summed by place and owner."""
        found = torch.zeros(size * self._reading.size, dtype=torch.float32)
        length = self._reading.length.float()
        for of in at:
            found.index_add_(0, of * self._reading.size + self._reading.owner, length)
        return found.view(size, -1)


NEVER = -torch.inf
"""When a message that carries nothing arrives; and its rows, where it would only be in the way."""


class Counted(NamedTuple):
    """Rows for all positions, which are looked up when they are needed."""

    table: Tensor
    """[entries, owners, passes]."""
    entry: int
    owner: int

    def of_all(self, moved: Moved) -> Tensor:
        """[positions, passes]."""
        return self.table[self.entry].index_select(0, moved.to(self.owner))


class OfAll:
    """How many rows, for all positions at once (`Counted`), as written for position 0.

    What is said of `owner` is said of each position's own counterpart: see `Moved`.
    """

    alone = False

    def __init__(self, passes: Sequence[Seen]) -> None:
        self._passes = passes

    @cached_property
    def _between(self) -> Tensor:
        """By distance, [distances, owners, passes]."""
        between = torch.stack([each.between for each in self._passes], 2)
        here = torch.arange(len(between))
        return _or_never(between[here, (here + here[:, None]) % len(here)])

    @cached_property
    def _by_place(self) -> tuple[Tensor, ...]:
        each = zip(*(seen.by_place() for seen in self._passes), strict=True)
        tables = [torch.stack(x, -1) for x in each]
        self._places = tables[0].shape[1]
        return tuple(_or_never(table.flatten(0, 1)) for table in tables)

    @cached_property
    def _by_round(self) -> tuple[Tensor, ...]:
        each = zip(*(seen.by_round() for seen in self._passes), strict=True)
        return tuple(_or_never(torch.stack(x, -1)) for x in each)

    def reads(self, owner: int) -> bool:
        return True

    def owners(self, size: int) -> Iterable[int]:
        return range(size)

    def readers(self, size: int) -> Iterable[int]:
        return range(size)

    def between(self, owner: int, by: int) -> Carried:
        return Counted(self._between, (by - owner) % len(self._between), owner)

    def together(self, some: Carried, others: Carried) -> Carried:
        return others

    def ahead(self, owner: int, i: int, j: int) -> Carried:
        table = self._by_place[0]
        return Counted(table, i * self._places + j, owner)

    def ahead_of_round(self, owner: int, i: int) -> Carried:
        return Counted(self._by_round[0], i, owner)

    def so_far(self, owner: int, i: int, j: int) -> Carried:
        table = self._by_place[1]
        return Counted(table, i * self._places + j, owner) if j >= 0 else ()

    def so_far_in_rounds(self, owner: int, i: int) -> Carried:
        return Counted(self._by_round[1], i, owner) if i >= 0 else ()


def _or_never(rows: Tensor) -> Tensor:
    return rows.masked_fill_(rows == 0, NEVER)


class Moved:
    """Programs are those of position 0, moved: what it does with p, position q does with `to(p)[q]`."""

    def __init__(self, nodes: int, intra: int) -> None:
        self._nodes, self._intra = nodes, intra
        self._twice: dict[int, Tensor] = {}

    def to(self, position: int) -> Tensor:
        """Int64 [positions]. A view: all moves over as many nodes lie in one table."""
        m, l = divmod(position, self._intra)  # noqa: E741
        size = self._nodes * self._intra
        if self._nodes == 1:
            m, l = l, 0  # noqa: E741  # one node of many positions moves as many nodes of one do
            return self._of_local(0, 1, size)[m : m + size]
        return self._of_local(l, self._intra, self._nodes)[m * self._intra :][:size]

    def _of_local(self, l: int, intra: int, nodes: int) -> Tensor:  # noqa: E741
        """Every position moved by `l` within its node, twice over."""
        if l not in self._twice:
            once = torch.arange(nodes)[:, None] * intra + (torch.arange(intra) + l) % intra
            self._twice[l] = once.flatten().repeat(2)
        return self._twice[l]


@lru_cache(maxsize=64)
def moved(nodes: int, intra: int) -> Moved:
    """The moves of a ring of nodes x intra positions. Kept."""
    return Moved(nodes, intra)
