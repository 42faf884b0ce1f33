"""Bands: disjoint rectangles of queries x keys, each cut by two diagonals; a mask is a list of them.

A list of bands is an int64 tensor [bands, 6]:

    q0, q1, k0, k1, low, high: pair (i, j) is allowed iff q0 <= i < q1, k0 <= j < k1, low <= j - i <= high.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

UNBOUNDED = 2**40
"""A diagonal beyond all sequences."""


def everything(n: int) -> Tensor:
    """Return one band with all pairs of n tokens."""
    return torch.tensor([[0, n, 0, n, -UNBOUNDED, UNBOUNDED]])


def transposed(bands: Tensor) -> Tensor:
    """Exchange queries and keys."""
    return bands[:, (2, 3, 0, 1, 5, 4)] * torch.tensor([1, 1, 1, 1, -1, -1])


def tightened(bands: Tensor) -> Tensor:
    """Bands [bands, 6] without rows and columns that their diagonals do not reach; empty ones left out."""
    q0, q1, k0, k1, low, high = bands.unbind(1)
    q0, q1 = torch.maximum(q0, k0 - high), torch.minimum(q1, k1 - low)
    k0, k1 = torch.maximum(k0, q0 + low), torch.minimum(k1, q1 + high)
    # A diagonal that cuts nothing is none.
    low = torch.where(low <= k0 - (q1 - 1), -UNBOUNDED, low)
    high = torch.where(high >= (k1 - 1) - q0, UNBOUNDED, high)
    return torch.stack([q0, q1, k0, k1, low, high], 1)[(q0 < q1) & (k0 < k1) & (low <= high)]


def of_classes(bands: Tensor, first: Tensor, stride: int) -> Tensor:
    """Return bands over the tokens first, first + stride, ..., counted 0, 1, ...: of each `first` in turn.

    The classes of residues by a stride, [classes * bands, 6]. Bands may be empty: see `tightened`.
    """
    edges = -((first[:, None, None] - bands[:, :4]) // stride)
    low, high = bands[:, 4:].unbind(1)
    low = torch.where(low > -UNBOUNDED, -(-low // stride), low)
    high = torch.where(high < UNBOUNDED, high // stride, high)
    diagonals = torch.stack([low, high], 1).expand(len(first), -1, -1)
    return torch.cat([edges, diagonals], 2).flatten(0, 1)


def intersected(a: Tensor, b: Tensor) -> Tensor:
    """Return the bands of the intersection of two lists of disjoint bands."""
    if len(a) > len(b):
        a, b = b, a
    if len(a) * len(b) <= 2**14:
        return _met(a.repeat_interleave(len(b), 0), b.repeat(len(a), 1))
    b = b[b[:, 0].argsort(stable=True)]
    if bool((b[:, 1].diff() >= 0).all()):  # then those that meet a row of `a` stand together
        first = torch.searchsorted(b[:, 1].contiguous(), a[:, 0].contiguous(), right=True)
        last = torch.searchsorted(b[:, 0].contiguous(), a[:, 1].contiguous())
        return torch.cat([_met(a[i], b[j]) for i, j in pairs_of_runs(first, last)] or [a[:0]])
    return torch.cat([_met(row.expand_as(near := _near(row, b)), near) for row in a])


BLOCK = 2**18
"""Rows of a table that are worked on at once: more would cost memory."""


def pairs_of_runs(first: Tensor, last: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every (i, j) with first[i] <= j < last[i], block by block, as two lists of indices."""
    lengths = (last - first).clamp(min=0)
    ends = lengths.cumsum(0)
    start = 0
    while start < len(first):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(ends, before + BLOCK, right=True)))
        of = lengths[start:stop]
        i = torch.arange(start, stop).repeat_interleave(of)
        place = torch.arange(int(of.sum())) - (of.cumsum(0) - of).repeat_interleave(of)
        yield i, first[i] + place
        start = stop


def _near(row: Tensor, bands: Tensor) -> Tensor:
    """Return the bands whose rectangles meet the rectangle of `row`."""
    meet = (bands[:, 0] < row[1]) & (row[0] < bands[:, 1]) & (bands[:, 2] < row[3]) & (row[2] < bands[:, 3])
    return bands[meet]


def _met(a: Tensor, b: Tensor) -> Tensor:
    larger, smaller = torch.maximum(a, b), torch.minimum(a, b)
    return tightened(torch.where(torch.tensor([True, False] * 3), larger, smaller))


def disjoint(bands: Tensor) -> Tensor:
    """Disjoint bands with the same union."""
    for at in range(len(bands)):
        row, rest = bands[at], bands[at + 1 :]
        if len(_met(row.expand_as(near := _near(row, rest)), near)):
            return _union(bands)
    return bands


def _union(bands: Tensor) -> Tensor:
    """Cut at all edges; in each cell the diagonals' intervals are merged."""
    rows = []
    for q0, q1 in pairwise(bands[:, :2].unique().tolist()):
        of_q = bands[(bands[:, 0] <= q0) & (bands[:, 1] >= q1)]
        for k0, k1 in pairwise(of_q[:, 2:4].unique().tolist()):
            cell = of_q[(of_q[:, 2] <= k0) & (of_q[:, 3] >= k1)]
            merged: list[list[int]] = []
            for low, high in sorted(cell[:, 4:].tolist()):
                if merged and low <= merged[-1][1] + 1:
                    merged[-1][1] = max(merged[-1][1], high)
                else:
                    merged.append([low, high])
            rows += [[q0, q1, k0, k1, *interval] for interval in merged]
    return tightened(torch.tensor(rows, dtype=torch.int64).reshape(-1, 6))
