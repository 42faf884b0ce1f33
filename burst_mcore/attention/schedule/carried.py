"""The rows of each message: of a block the rows still to be read, of a gradient the rows read so far.

Round i is node i on a block's path; there it visits place after place. Its owner is at round 0, place 0:
rows that only the owner reads are not sent, and their gradients stay with the owner. The writers of programs
ask a `Messages` for the rows of every message. `Messages` itself answers all rows, `OfRingRank` the rows for
one ring rank, `burst_plan.simulate.counted.OfAll` their number for all ring ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from burst_mcore.attention.geometry.reading import Reading
from burst_mcore.attention.geometry.rows import Rows, union

T = TypeVar("T", default=range)
Carried = tuple[T, ...] | None
"""The rows of a block in an action, None for all: ranges (`Rows`) in the program of a rank. In the
program of all ranks at once T is `burst_plan.simulate.counted.Counted`, the number of rows."""


def nothing(rows: Carried[T]) -> bool:
    """Return whether no rows are carried."""
    return rows is not None and not rows


class Messages(Generic[T]):
    """The rows that ring ranks send, receive and compute; the base class answers all rows."""

    def reads(self, owner: int) -> bool:
        """Return whether the ring rank reads the block of `owner`."""
        return True

    def owners(self, size: int) -> Iterable[int]:
        """Return the owners, among `size` ring ranks, of the blocks that the ring rank reads."""
        return range(size)

    def readers(self, size: int) -> Iterable[int]:
        """Return the ring ranks that read the ring rank's own block."""
        return range(size)

    def between(self, owner: int, reader: int) -> Carried[T]:
        """Return the rows of `owner` that `reader` reads."""
        return None

    def together(self, rows: Carried[T], others: Carried[T]) -> Carried[T]:
        """Return the union of the rows."""
        return None

    def read_from(self, owner: int, i: int, j: int) -> Carried[T]:
        """Return the rows of `owner` that are read in round i from place j on."""
        return None

    def read_from_round(self, owner: int, i: int) -> Carried[T]:
        """Return the rows of `owner` that are read from round i on."""
        return None

    def read_until(self, owner: int, i: int, j: int) -> Carried[T]:
        """Return the rows of `owner` that others read in round i up to place j, j included."""
        return None if elsewhere(i, j) else ()

    def read_until_round(self, owner: int, i: int) -> Carried[T]:
        """Return the rows of `owner` that other nodes read up to round i."""
        return None if i > 0 else ()

    def remote(self, owner: int) -> Carried[T]:
        """Return the rows of `owner` that other ring ranks read."""
        return None


def elsewhere(i: int, j: int) -> bool:
    """Return whether place j of round i exists and is not the owner's."""
    return j >= 0 and (i, j) > (0, 0)


class Itinerary:
    """The first and last reader of each segment of a `Reading` on its path over a ring of nodes x intra.

    The owner does not count as a reader.

    Attributes:
        first, last: [segments, rounds]: the first and last place of a reader; `intra` and -1 if none.
        first_round: [segments]: the first round after round 0; `nodes` if none.
        last_round: [segments]; -1 if none.
        remote: bool [segments]: whether there is a reader.
    """

    def __init__(self, reading: Reading, nodes: int, intra: int, turn: int) -> None:
        self.reading, self.nodes, self.intra, self.turn = reading, nodes, intra, turn
        block = max(1, 2**20 // reading.size)
        segments = zip(reading.owner.split(block), reading.read.split(block, dim=1), strict=True)
        blocks = [self._visits(owners, read) for owners, read in segments]
        self.first, self.last = (torch.cat(x) for x in zip(*blocks, strict=True))
        some, rounds = self.last >= 0, torch.arange(nodes)
        self.first_round = torch.where(some & (rounds > 0), rounds, nodes).amin(1)
        self.last_round = torch.where(some, rounds, -1).amax(1)
        self.remote = some.any(1)

    def _visits(self, owners: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        m, l = owners[:, None] // self.intra, owners[:, None] % self.intra  # noqa: E741
        node = (m + self.turn * torch.arange(self.nodes)) % self.nodes
        local = (l + self.turn * torch.arange(self.intra)) % self.intra
        by = node[:, :, None] * self.intra + local[:, None, :]  # [segments, rounds, places]: ring rank
        visited = read.T.gather(1, by.flatten(1)).view(by.shape).to(torch.int32)
        visited[:, 0, 0] = 0  # the owner itself
        place = torch.arange(1, self.intra + 1, dtype=torch.int32)
        # Weights L ... 1 are largest at the first reader, 1 ... L at the last; 0 without a reader.
        return self.intra - (visited * place.flip(0)).amax(2), (visited * place).amax(2) - 1


class OfRingRank(Messages[range]):
    """Messages of one ring rank, as rows."""

    def __init__(self, reading: Reading, ring_rank: int, itinerary: Itinerary | None = None) -> None:
        self._reading, self._itinerary = reading, itinerary
        self._meets, self._ring_rank = reading.meets, ring_rank
        self._reads = dict.fromkeys(reading.meets[:, ring_rank].nonzero().flatten().tolist())
        self._columns: dict[tuple[str, int, int], list[int]] = {}

    def reads(self, owner: int) -> bool:
        return owner in self._reads

    def owners(self, size: int) -> Iterable[int]:
        return self._reads

    def readers(self, size: int) -> Iterable[int]:
        return [*self._meets[self._ring_rank].nonzero().flatten().tolist()]

    def between(self, owner: int, reader: int) -> Carried:
        return self._some(self._reading.needed(owner, reader))

    def together(self, rows: Carried, others: Carried) -> Carried:
        return None if rows is None or others is None else self._some(union([*rows, *others]))

    def read_from(self, owner: int, i: int, j: int) -> Carried:
        return self._rows(owner, [place >= j for place in self._places("last", owner, i)])

    def read_from_round(self, owner: int, i: int) -> Carried:
        return self._rows(owner, [round_ >= i for round_ in self._places("last_round", owner)])

    def read_until(self, owner: int, i: int, j: int) -> Carried:
        return self._rows(owner, [place <= j for place in self._places("first", owner, i)])

    def read_until_round(self, owner: int, i: int) -> Carried:
        return self._rows(owner, [round_ <= i for round_ in self._places("first_round", owner)])

    def remote(self, owner: int) -> Carried:
        return self._rows(owner, [bool(each) for each in self._places("remote", owner)])

    def _places(self, name: str, owner: int, i: int = 0) -> list[int]:
        """Return a column of the itinerary for the owner's segments; read for a whole node at a time."""
        assert self._itinerary is not None
        bounds, intra = self._reading.bounds, self._itinerary.intra
        node = owner - owner % intra
        key = name, node, i
        if key not in self._columns:
            column: Tensor = getattr(self._itinerary, name)
            column = column[bounds[node] : bounds[node + intra]]
            self._columns[key] = (column if column.dim() == 1 else column[:, i]).tolist()
        return self._columns[key][bounds[owner] - bounds[node] : bounds[owner + 1] - bounds[node]]

    def _rows(self, owner: int, which: list[bool]) -> Carried:
        if not any(which):
            return ()
        return None if all(which) else self._reading.joined(owner, which)

    def _some(self, rows: Rows) -> Carried:
        return None if rows == (range(self._reading.rows),) else rows
