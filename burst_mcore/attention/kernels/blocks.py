"""Patterns as lists of blocks, the form in which the Triton kernel walks them. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern

FAR = 2**30
"""A diagonal beyond all others, in 32 bits."""


class Blocks(NamedTuple):
    """For each block of one side, the blocks of the other that it meets: int32 tensors.

    Block i meets `others[starts[i]:starts[i + 1]]`. Up to `full[i]` they are seen wholly. Of a later entry e,
    parts[firsts[e]:firsts[e + 1]] say which pairs meet. Their rows are the fields of `Piece`, in rows and
    columns of the tile, whichever side is walked.
    """

    starts: Tensor
    full: Tensor
    others: Tensor
    firsts: Tensor
    parts: Tensor

    def to(self, device: torch.device) -> Blocks:
        """Return the lists on a device."""
        return Blocks(*(x.to(device) for x in self))


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
    count = -(-columns // block_n) if by_columns else -(-rows // block_m)
    order = torch.argsort(
        other + (~whole * 1 + 2 * own) * (int(other.max()) + 1 if len(other) else 1), stable=True
    )
    part, own, other, whole = part[order], own[order], other[order], whole[order]
    new = torch.ones_like(whole)
    new[1:] = (own[1:] != own[:-1]) | (other[1:] != other[:-1])
    entry, end, whole_part = new.nonzero().flatten(), torch.tensor([len(part)]), whole
    own, other, whole = own[entry], other[entry], whole[entry]
    starts = torch.searchsorted(own, torch.arange(count + 1))
    full = starts[:-1] + torch.zeros(count, dtype=torch.int64).index_add_(0, own, whole.long())
    partly = ~whole_part
    firsts = torch.cat([partly.new_zeros(1).long(), partly.long().cumsum(0)])[torch.cat([entry, end])]
    lists = (starts, full, other, firsts, parts[part[partly]])
    return Blocks(*(x.to(torch.int32).contiguous() for x in lists))


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
