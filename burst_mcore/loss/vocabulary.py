"""The vocabulary sharded over a tensor-parallel group: the rows of a rank, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.loss.terms import combined


@dataclass(frozen=True)
class Vocabulary:
    """This rank's `rows` of the vocabulary from `first` on, of `size` in all."""

    size: int
    first: int
    rows: int
    group: dist.ProcessGroup | None = None
    """None: this rank holds all rows."""

    @property
    def most_rows(self) -> int:
        """The maximum rows of a rank."""
        return self.rows if self.group is None else -(-self.size // dist.get_world_size(self.group))

    def columns(self, labels: Tensor, ignore_index: int) -> Tensor:
        """Return labels as columns of this rank's logits; -1 for another rank's and for ignored labels."""
        column = labels - self.first
        is_local = (labels != ignore_index) & (column >= 0) & (column < self.rows)
        return column.where(is_local, -1)

    def whole(self, statistics: Tensor) -> Tensor:
        """Return the statistics of all columns, from the statistics of every rank's columns."""
        if self.group is None:
            return statistics
        parts = statistics.new_empty((dist.get_world_size(self.group), *statistics.shape))
        dist.all_gather(list(parts.unbind()), statistics, group=self.group)
        return combined(parts)

    def summed(self, x: Tensor, scattered: bool) -> Tensor:
        """Return the sum of all ranks' x: of the whole sequence, or of this rank's part if `scattered`."""
        if self.group is None:
            return x
        if not scattered:
            dist.all_reduce(x, group=self.group)
            return x
        part = torch.empty_like(self.part(x))
        dist.reduce_scatter_tensor(part, x, group=self.group)
        return part

    def gathered(self, sequence: Tensor) -> Tensor:
        """Return the whole sequence from each rank's part, along the first dim."""
        assert self.group is not None
        size = dist.get_world_size(self.group)
        whole = sequence.new_empty((size * sequence.shape[0], *sequence.shape[1:]))
        dist.all_gather(list(whole.chunk(size)), sequence.contiguous(), group=self.group)
        return whole

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sequence, along the first dim."""
        assert self.group is not None
        return whole.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]


def shard(vocabulary: int, size: int, rank: int) -> tuple[int, int]:
    """Return (first row, rows) of a rank's part: ceil(vocabulary / size) each, fewer at the end."""
    rows = -(-vocabulary // size)
    first = min(rank * rows, vocabulary)
    return first, min(rows, vocabulary - first)
