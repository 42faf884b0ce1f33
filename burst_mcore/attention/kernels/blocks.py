"""Patterns as lists of blocks, the form in which the Triton kernel walks them. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.captured import keep_for_graphs
from burst_mcore.attention.geometry.pattern import Pattern

FAR = 2**30
"""A diagonal beyond all others, in 32 bits."""


class Blocks(NamedTuple):
    """For each block of one side, the blocks of the other that it meets: int32 tensors.

    Block i meets `others[starts[i]:starts[i + 1]]`. Up to `full[i]` they are seen wholly. Up to `lone[i]` one
    part without a step says which pairs meet. Of any entry e that is not seen wholly,
    parts[firsts[e]:firsts[e + 1]] say so. Their rows are the fields of `Piece`, in rows and columns of the
    tile, whichever side is walked.
    """

    starts: Tensor
    full: Tensor
    lone: Tensor
    others: Tensor
    firsts: Tensor
    parts: Tensor


ALIGNED = 4
"""Numbers at whose multiples lists begin in a common memory: 16 bytes, as kernels are compiled for."""


def on_device(lists: Sequence[Blocks], device: torch.device) -> list[Blocks]:
    """Return many lists on a device, by one copy which the host does not wait for.

    Pinned memory is torch's: its allocator lends no block again before copies from it are done.
    """
    tensors = [x for one in lists for x in one]
    ends = list(accumulate((-(-x.numel() // ALIGNED) * ALIGNED for x in tensors), initial=0))
    memory = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, x in zip(ends, tensors, strict=False):
        memory[start : start + x.numel()] = x.flatten()
    keep_for_graphs(device, memory)
    there = memory.to(device, non_blocking=True)
    views = [there[start : start + x.numel()].view(x.shape) for start, x in zip(ends, tensors, strict=False)]
    return [Blocks(*views[i : i + len(Blocks._fields)]) for i in range(0, len(views), len(Blocks._fields))]


def blocks(pattern: Pattern, block_m: int, block_n: int, *, by_columns: bool) -> Blocks:
    """Return the lists for blocks of block_m rows and block_n columns, by blocks of rows or of columns."""
    rows, columns = pattern.shape
    parts = _parts(pattern)
    m0, m1, n0, n1, low, high, step, _ = parts.unbind(1)
    first_m, first_n = m0 // block_m, n0 // block_n
    many_m, many_n = (-(-m1 // block_m) - first_m, -(-n1 // block_n) - first_n)
    times = (many_m * many_n).clamp_min(0)
    part = torch.repeat_interleave(torch.arange(len(parts)), times)
    index = torch.arange(int(times.sum())) - (times.cumsum(0) - times)[part]
    bm, bn = first_m[part] + index // many_n[part], first_n[part] + index % many_n[part]

    top, bottom = torch.maximum(bm * block_m, m0[part]), torch.minimum((bm + 1) * block_m, m1[part])
    left, right = torch.maximum(bn * block_n, n0[part]), torch.minimum((bn + 1) * block_n, n1[part])
    apart = n0[part] - m0[part]  # diagonals of a part are counted from its corner
    nearest, farthest = left - (bottom - 1) - apart, (right - 1) - top - apart
    met = (nearest <= high[part]) & (farthest >= low[part])
    whole = (top == bm * block_m) & (bottom == torch.clamp((bm + 1) * block_m, max=rows))
    whole &= (left == bn * block_n) & (right == (bn + 1) * block_n)
    whole &= (nearest >= low[part]) & (farthest <= high[part]) & (step[part] == 1)
    part, bm, bn, whole = part[met], bm[met], bn[met], whole[met]

    own, other = (bn, bm) if by_columns else (bm, bn)
    many = -(-columns // block_n) if by_columns else -(-rows // block_m)
    width = int(other.max()) + 1 if len(other) else 1
    entries, entry = torch.unique(own * width + other, return_inverse=True)
    is_whole = torch.zeros(len(entries), dtype=torch.bool).index_put_((entry,), whole)
    alone = torch.bincount(entry, minlength=len(entries)) == 1
    alone &= ~torch.zeros(len(entries), dtype=torch.bool).index_put_((entry[step[part] > 1],), _TRUE)
    kind = torch.where(is_whole, 0, torch.where(alone, 1, 2))
    order = torch.argsort(entries // width * 3 * width + kind * width + entries % width)
    place = torch.empty_like(order).index_put_((order,), torch.arange(len(order)))
    own, other, kind = entries[order] // width, entries[order] % width, kind[order]
    starts = torch.searchsorted(own, torch.arange(many + 1))
    ends = [
        starts[:-1] + torch.zeros(many, dtype=torch.int64).index_add_(0, own, (kind <= most).long())
        for most in (0, 1)
    ]
    by_entry = torch.argsort(place[entry], stable=True)
    by_entry = by_entry[~whole[by_entry]]
    firsts = torch.searchsorted(place[entry][by_entry], torch.arange(len(order) + 1))
    lists = (starts, *ends, other, firsts, parts[part[by_entry]])
    return Blocks(*(x.to(torch.int32).contiguous() for x in lists))


_TRUE = torch.tensor(True)


def _parts(pattern: Pattern) -> Tensor:
    """Return the parts of a pattern, int64 [parts, 8]."""
    rows, columns = pattern.shape
    if pattern.fixed_table is not None:
        raise ValueError("a table of rows x columns has no pieces to walk")
    low, high = (
        (-FAR if pattern.low is None else pattern.low),
        (FAR if pattern.high is None else pattern.high),
    )
    table = torch.tensor(pattern.parts or [(0, rows, 0, columns, low, high, 1, 0)], dtype=torch.int64)
    table[:, 4:6].clamp_(-FAR, FAR)
    return table


def diagonals(pattern: Pattern) -> tuple[int, int] | None:
    """Return (low, high) of a pattern that is a band of the whole tile; None if it has parts."""
    if pattern.masked:
        return None
    return -FAR if pattern.low is None else pattern.low, FAR if pattern.high is None else pattern.high
