"""Patterns as lists of blocks, which the Triton kernel walks. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern

FAR = 2**30
"""A diagonal beyond all others, in 32 bits."""
LARGEST_BLOCK = 128
"""The maximum rows or columns of a block: offsets in a block have 8 bits."""


class BlockLists(NamedTuple):
    """The blocks of the other side for each block of one side (its own), as int32 tensors.

    Block i has the `entries` from starts[i] to starts[i + 1]. Up to `full[i]` they are full blocks, each
    once. Each further entry is one part of a block: a block with several parts has several entries. An entry
    is four numbers:

    * the block of the other side;
    * own0, own1, others0, others1, 8 bits each: rows of either side within the block;
    * low, high, step, 8 bits each: pairs with other - own in range(low, high + 1, step) attend;
    * 2^32 / step, rounded up, plus 256, modulo 2^32: a factor whose products detect multiples of the step.
    """

    starts: Tensor
    full: Tensor
    entries: Tensor


ALIGNED = 4
"""The alignment of lists in common memory, in int32 numbers: the 16 bytes that kernels are compiled for."""


def on_device(lists: Sequence[BlockLists], device: torch.device) -> list[BlockLists]:
    """Return many lists on a device, by one asynchronous copy.

    The pinned memory is torch's: its allocator reuses a block only after copies from it are complete.
    """
    tensors = [x for one in lists for x in one]
    ends = list(accumulate((-(-x.numel() // ALIGNED) * ALIGNED for x in tensors), initial=0))
    memory = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, x in zip(ends, tensors, strict=False):
        memory[start : start + x.numel()] = x.flatten()
    copy = memory.to(device, non_blocking=True)
    views = [copy[start : start + x.numel()].view(x.shape) for start, x in zip(ends, tensors, strict=False)]
    fields = len(BlockLists._fields)
    return [BlockLists(*views[i : i + fields]) for i in range(0, len(views), fields)]


def blocks(pattern: Pattern, block_m: int, block_n: int, *, by_columns: bool) -> BlockLists:
    """Return the lists of blocks of block_m rows x block_n columns, by blocks of rows or of columns."""
    assert max(block_m, block_n) <= LARGEST_BLOCK
    rows, columns = pattern.shape
    parts = _parts(pattern)
    m0, m1, n0, n1, low, high, step, shift = parts.unbind(1)
    first_m, first_n = m0 // block_m, n0 // block_n
    many_m, many_n = (-(-m1 // block_m) - first_m, -(-n1 // block_n) - first_n)
    times = (many_m * many_n).clamp_min(0)
    part = torch.repeat_interleave(torch.arange(len(parts)), times)
    index = torch.arange(int(times.sum())) - (times.cumsum(0) - times)[part]
    bm, bn = first_m[part] + index // many_n[part], first_n[part] + index % many_n[part]

    corner_m, corner_n, step = bm * block_m, bn * block_n, step[part]
    top, bottom = torch.maximum(corner_m, m0[part]), torch.minimum(corner_m + block_m, m1[part])
    left, right = torch.maximum(corner_n, n0[part]), torch.minimum(corner_n + block_n, n1[part])
    offset = n0[part] - m0[part]  # diagonals of a part are counted from its corner
    nearest, farthest = left - (bottom - 1) - offset, (right - 1) - top - offset
    low, high = torch.maximum(nearest, low[part]), torch.minimum(farthest, high[part])
    whole = (top == corner_m) & (bottom == torch.clamp(corner_m + block_m, max=rows)) & (step == 1)
    whole &= (left == corner_n) & (right == corner_n + block_n) & (low == nearest) & (high == farthest)
    low = low + (shift[part] - low) % step  # the first and last diagonal that are = shift (mod step)
    high = high - (high - low) % step
    nonempty = low <= high
    step = torch.where(low == high, 1, step)
    low, high = low + offset - (corner_n - corner_m), high + offset - (corner_n - corner_m)
    spans = [top - corner_m, bottom - corner_m, left - corner_n, right - corner_n]
    side, partner, count = bm, bn, -(-rows // block_m)
    if by_columns:
        side, partner, count = bn, bm, -(-columns // block_n)
        low, high, spans = -high, -low, spans[2:] + spans[:2]
    words = (partner, _bytes(*spans), _bytes(low, high, step), _signed(-(-(1 << 32) // step) + 256))
    entries, side, is_part = torch.stack(words, 1)[nonempty], side[nonempty], (~whole[nonempty]).long()
    width = int(partner.max()) + 1 if len(partner) else 1
    order = torch.argsort((side * 2 + is_part) * (width) + partner[nonempty], stable=True)
    side, is_part = side[order], is_part[order]
    starts = torch.searchsorted(side, torch.arange(count + 1))
    full = starts[:-1] + torch.zeros(count, dtype=torch.int64).index_add_(0, side, 1 - is_part)
    return BlockLists(*(x.to(torch.int32).contiguous() for x in (starts, full, entries[order])))


def _bytes(*values: Tensor) -> Tensor:
    """Pack the lowest bytes of values into one number of 32 bits, the first value lowest."""
    word = torch.zeros_like(values[0])
    for place, value in enumerate(values):
        word |= (value & 255) << 8 * place
    return _signed(word)


def _signed(word: Tensor) -> Tensor:
    """Return a number modulo 2^32 as a signed number of 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def _parts(pattern: Pattern) -> Tensor:
    """Return the parts of a pattern, int64 [parts, 8]."""
    if pattern.fixed_table is not None:
        raise ValueError("a table of rows x columns has no pieces to walk")
    table = torch.tensor(pattern.pieces, dtype=torch.int64)
    table[:, 4:6].clamp_(-FAR, FAR)
    return table


def diagonals(pattern: Pattern) -> tuple[int, int] | None:
    """Return (low, high) of a pattern that is a band of the whole tile; None if it has parts."""
    if pattern.masked:
        return None
    return -FAR if pattern.low is None else pattern.low, FAR if pattern.high is None else pattern.high
