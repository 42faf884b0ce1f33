"""Runs: the tokens of a rank as ranges of global positions, ascending. Neighbours are joined."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Runs = tuple[range, ...]
"""Ranges of global positions, in ascending order, which is the order in which a rank stores its tokens."""


def joined(runs: Iterable[range]) -> Runs:
    """Join neighbouring runs."""
    first, *others = runs
    whole = [first]
    for run in others:
        if run.start == whole[-1].stop:
            whole[-1] = range(whole[-1].start, run.stop)
        else:
            whole.append(run)
    return tuple(whole)


def joined_table(ranks: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Return the runs of all ranks as a table, int64 [runs, 4]: rank, start, stop, step 1; neighbours as one.

    Args:
        ranks, start, stop: int64 [ranks, runs of a rank], ascending within each rank; runs may be empty.
    """
    filled = (stop > start).flatten()
    ranks, start, stop = (x.flatten()[filled] for x in (ranks, start, stop))
    begins = torch.ones_like(start, dtype=torch.bool)
    begins[1:] = (ranks[1:] != ranks[:-1]) | (start[1:] != stop[:-1])
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    return torch.stack([ranks[begins], start[begins], stop[ends], torch.ones_like(start[begins])], 1)
