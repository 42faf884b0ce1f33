"""Bands: disjoint rectangles of queries x keys, each cut by two diagonals; a mask is a list of them.

A list of bands is an int64 tensor [bands, 6]:

    q0, q1, k0, k1, low, high: pair (i, j) is allowed iff q0 <= i < q1, k0 <= j < k1, low <= j - i <= high.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

UNBOUNDED = 2**40
"""A diagonal beyond all sequences."""


def everything(n: int) -> Tensor:
    """Return one band with all pairs of n tokens."""
    return torch.tensor([[0, n, 0, n, -UNBOUNDED, UNBOUNDED]])


def transposed(bands: Tensor) -> Tensor:
    """Return bands with queries and keys exchanged."""
    return bands[:, (2, 3, 0, 1, 5, 4)] * torch.tensor([1, 1, 1, 1, -1, -1])


def tightened(bands: Tensor) -> Tensor:
    """Return bands [bands, 6] shrunk to the rows and columns with a pair, without empty bands."""
    inner = tight(bands)
    return inner[has_pairs(inner)]


def tight(bands: Tensor) -> Tensor:
    """Return bands [bands, 6] shrunk to the rows and columns with a pair; empty bands stay."""
    q0, q1, k0, k1, low, high = bands.unbind(1)
    q0, q1 = torch.maximum(q0, k0 - high), torch.minimum(q1, k1 - low)
    k0, k1 = torch.maximum(k0, q0 + low), torch.minimum(k1, q1 + high)
    # A diagonal that excludes no pair becomes unbounded.
    low = torch.where(low <= k0 - (q1 - 1), -UNBOUNDED, low)
    high = torch.where(high >= (k1 - 1) - q0, UNBOUNDED, high)
    return torch.stack([q0, q1, k0, k1, low, high], 1)


def has_pairs(bands: Tensor) -> Tensor:
    """Return whether each of `tight` bands has a pair."""
    q0, q1, k0, k1, low, high = bands.unbind(1)
    return (q0 < q1) & (k0 < k1) & (low <= high)


def of_classes(bands: Tensor, first: Tensor, stride: int) -> Tensor:
    """Return bands over each residue class of tokens, first, first + stride, ..., counted 0, 1, ...

    The result is [classes * bands, 6], with empty bands: see `tightened`.
    """
    edges = -((first[:, None, None] - bands[:, :4]) // stride)
    low, high = bands[:, 4:].unbind(1)
    low = torch.where(low > -UNBOUNDED, -(-low // stride), low)
    high = torch.where(high < UNBOUNDED, high // stride, high)
    diagonals = torch.stack([low, high], 1).expand(len(first), -1, -1)
    return torch.cat([edges, diagonals], 2).flatten(0, 1)


def intersected(a: Tensor, b: Tensor) -> Tensor:
    """Return the bands of the intersection of two lists of disjoint bands."""
    return torch.cat([tightened(_overlap(a[i], b[j])) for i, j in _near(a, b)] or [a[:0]])


def united(a: Tensor, b: Tensor) -> Tensor:
    """Return disjoint bands of the union of two lists of disjoint bands.

    Bands of one list stay unchanged; their pairs are removed from the other list. The list with fewer cuts a
    band is cut: the union of a causal band and many images has one more band for each image.
    """
    i, j = _meetings(a, b)
    if not len(i):
        return torch.cat([a, b])
    if i.bincount().max() < j.bincount().max():
        return torch.cat([b, _without(a, b, i, j)])
    return torch.cat([a, _without(b, a, j, i)])


def disjoint(bands: Tensor) -> Tensor:
    """Return disjoint bands with the same union."""
    i, j = _meetings(bands, bands)
    if bool((i == j).all()):
        return bands
    half = len(bands) // 2
    return united(disjoint(bands[:half]), disjoint(bands[half:]))


def _without(bands: Tensor, others: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return `bands` without the pairs of `others`; (i[p], j[p]): all overlapping (band, other)."""
    partners, counts = j[i.argsort(stable=True)], i.bincount(minlength=len(bands))
    first, of = counts.cumsum(0) - counts, torch.arange(len(bands))
    for place in range(int(counts.max())):  # remove the next partner of each band from its rest
        cut = counts[of] > place
        rest, owner = _minus(bands[cut], others[partners[first[of[cut]] + place]])
        bands, of = torch.cat([bands[~cut], rest]), torch.cat([of[~cut], of[cut][owner]])
    return bands


def _minus(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of a[p] without b[p], for each p, as disjoint bands, and the p of each band."""
    common = tight(_overlap(a, b))
    meet = has_pairs(common)[:, None]
    q0, q1, k0, k1, _, _ = common.unbind(1)
    none = torch.zeros_like(a)
    before, after, left, right, lower, upper = (a.clone() for _ in range(6))
    before[:, 1], after[:, 0] = q0, q1
    left[:, 3], right[:, 2] = k0, k1
    lower[:, 5], upper[:, 4] = torch.minimum(a[:, 5], b[:, 4] - 1), torch.maximum(a[:, 4], b[:, 5] + 1)
    for piece in (left, right, lower, upper):
        piece[:, 0], piece[:, 1] = q0, q1
    for piece in (lower, upper):
        piece[:, 2], piece[:, 3] = k0, k1
    cut = [torch.where(meet, piece, none) for piece in (before, after, left, right, lower, upper)]
    pieces = tight(torch.cat([torch.where(meet, none, a), *cut]))
    some = has_pairs(pieces)
    return pieces[some], torch.arange(len(a)).repeat(7)[some]


def _meetings(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (i, j) of all overlapping bands a[i] and b[j]."""
    pairs = [torch.zeros(2, 0, dtype=torch.int64)]
    for i, j in _near(a, b):
        pairs.append(torch.stack([i, j])[:, has_pairs(tight(_overlap(a[i], b[j])))])
    i, j = torch.cat(pairs, 1)
    return i, j


def _near(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (i, j) of all bands a[i] and b[j] that may overlap, block by block."""
    if len(a) > len(b):
        yield from ((i, j) for j, i in _near(b, a))
    elif len(a) * len(b) <= 2**14:
        yield torch.arange(len(a)).repeat_interleave(len(b)), torch.arange(len(b)).repeat(len(a))
    elif bool(((rows := b[order := b[:, 0].argsort(stable=True)])[:, 1].diff() >= 0).all()):
        # sorted: the bands of `b` that overlap a band of `a` are neighbours
        first = torch.searchsorted(rows[:, 1].contiguous(), a[:, 0].contiguous(), right=True)
        last = torch.searchsorted(rows[:, 0].contiguous(), a[:, 1].contiguous())
        yield from ((i, order[j]) for i, j in pairs_of_runs(first, last))
    else:
        for i, row in enumerate(a):
            meet = (b[:, 0] < row[1]) & (row[0] < b[:, 1]) & (b[:, 2] < row[3]) & (row[2] < b[:, 3])
            j = meet.nonzero().flatten()
            yield torch.full_like(j, i), j


BLOCK = 2**18
"""The rows of a table in one block, which limits memory."""


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


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    larger, smaller = torch.maximum(a, b), torch.minimum(a, b)
    return torch.where(torch.tensor([True, False] * 3), larger, smaller)
