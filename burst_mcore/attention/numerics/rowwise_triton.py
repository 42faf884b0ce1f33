"""The passes of `rowwise` as Triton kernels; the equations are there. One program handles a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Rows of a program."""
OF_ROWS = ["count", "rows", "heads", "lse_b", "lse_h", "lse_r", "delta_b", "delta_h", "delta_r"]
"""Arguments that depend on the number of rows: no kernel is specialized for their values. Strides of the
other tensors are multiples of head dims."""


@triton.jit
def _at(ids, rows, heads, batch_stride, row_stride, head_stride):
    """Return offsets of rows, counted as (batch, row, head)."""
    ids = ids.to(tl.int64)
    head, row, batch = ids % heads, ids // heads % rows, ids // heads // rows
    return batch * batch_stride + row * row_stride + head * head_stride


@triton.jit(do_not_specialize=OF_ROWS[:3] + OF_ROWS[6:], do_not_specialize_on_alignment=["delta"])
def _delta(
    dout, out, delta, count, rows, heads, dout_b, dout_r, dout_h, out_b, out_r, out_h, delta_b, delta_h,
    delta_r, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    valid = ids < count
    inside = valid[:, None] & (d < USED)[None, :]
    from_dout = dout + _at(ids, rows, heads, dout_b, dout_r, dout_h)[:, None] + d[None, :]
    x = tl.load(from_dout, mask=inside, other=0.0)
    from_out = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    y = tl.load(from_out, mask=inside, other=0.0)
    products = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + _at(ids, rows, heads, delta_b, delta_r, delta_h), products, mask=valid)


@triton.jit(do_not_specialize=OF_ROWS[:3] + OF_ROWS[6:], do_not_specialize_on_alignment=["delta"])
def _stand_in(
    dout, delta, out, count, rows, heads, dout_b, dout_r, dout_h, delta_b, delta_h, delta_r, out_b, out_r,
    out_h, FAINT: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    valid = ids < count
    inside = valid[:, None] & (d < USED)[None, :]
    from_dout = dout + _at(ids, rows, heads, dout_b, dout_r, dout_h)[:, None] + d[None, :]
    x = tl.load(from_dout, mask=inside, other=0.0)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    empty = largest == 0.0
    largest = tl.where(empty, 1.0, largest)
    unit = x / largest[:, None]
    rest = tl.load(delta + _at(ids, rows, heads, delta_b, delta_r, delta_h), mask=valid, other=0.0) / largest
    faint = tl.sum(unit * unit, 1) * FAINT
    result = unit * 0.0
    for third in tl.static_range(3):
        x = tl.where((d * 3 // USED == third)[None, :], unit, 0.0)
        squares = tl.sum(x * x, 1)
        bears = squares > faint
        factor = tl.where(bears, rest / tl.where(bears, squares, 1.0), 0.0)
        rounded = (x * factor[:, None]).to(out.dtype.element_ty).to(tl.float32)
        rest -= tl.sum(x * rounded, 1)
        result += rounded
    to = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=OF_ROWS[:6], do_not_specialize_on_alignment=["lses", "lse"])
def _combine(
    outs, lses, out, lse, count, rows, heads, outs_s, out_b, out_r, out_h, lse_b, lse_h, lse_r,
    PARTS: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    valid = ids < count
    inside = valid[:, None] & (d < USED)[None, :]
    of_lse: tl.constexpr = lses.dtype.element_ty
    from_lses = lses + _at(ids, rows, heads, heads * rows, 1, rows)
    maxima = tl.full((ROWS,), -float("inf"), dtype=of_lse)
    for i in tl.static_range(PARTS):
        part = tl.load(from_lses + i * count.to(tl.int64), mask=valid, other=-float("inf"))
        maxima = tl.maximum(maxima, part, tl.PropagateNan.ALL)
    finite = tl.where(maxima == -float("inf"), 0.0, maxima)
    total, sums = (maxima * 0.0).to(tl.float32), tl.zeros((ROWS, DIM), dtype=tl.float32)
    total = tl.where(maxima == -float("inf"), 0.0, total)
    for i in tl.static_range(PARTS):
        part = tl.load(from_lses + i * count.to(tl.int64), mask=valid, other=-float("inf"))
        weight = tl.exp((part - finite).to(tl.float32))
        at = _at(ids, rows, heads, outs_s[3 * i], outs_s[3 * i + 1], outs_s[3 * i + 2])
        x = tl.load(outs[i] + at[:, None] + d[None, :], mask=inside, other=0.0)
        sums += weight[:, None] * x.to(tl.float32)
        total += weight
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    to_out = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    tl.store(to_out, result.to(out.dtype.element_ty), mask=inside)
    merged = (finite + tl.log(total.to(of_lse))).to(lse.dtype.element_ty)
    tl.store(lse + _at(ids, rows, heads, lse_b, lse_r, lse_h), merged, mask=valid)


@triton.jit(do_not_specialize=OF_ROWS[:3])
def _add(
    parts, out, count, rows, heads, parts_s, out_b, out_r, out_h, PARTS: tl.constexpr, USED: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (ids < count)[:, None] & (d < USED)[None, :]
    sums = tl.zeros((ROWS, DIM), dtype=tl.float32)
    for i in tl.static_range(PARTS):
        at = _at(ids, rows, heads, parts_s[3 * i], parts_s[3 * i + 1], parts_s[3 * i + 2])
        sums += tl.load(parts[i] + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    to = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


def delta_rows(dout: Tensor, out: Tensor, delta: Tensor) -> None:
    """Set delta [B, H, S] to rowsum(dout * out)."""
    _launch(_delta, dout, (dout, out, delta))


def stand_in_rows(dout: Tensor, delta: Tensor, out: Tensor, faint: float) -> None:
    """Set out to dout scaled by thirds, with rowsum(dout * out) = delta; thirds below `faint` stay zero."""
    _launch(_stand_in, dout, (dout, delta, out), FAINT=faint)


def combine_rows(parts: Sequence[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """Set (out, lse) to the softmax over the keys of all parts."""
    outs, lses = zip(*parts, strict=True)  # lses are stacked: Triton recompiles for alignments in a tuple
    _launch(_combine, out, (out, lse), (outs,), torch.stack(lses), PARTS=len(parts))


def add_rows(parts: Sequence[Tensor], total: Tensor) -> None:
    """Set total to the sum of the parts."""
    _launch(_add, total, (total,), (tuple(parts),), PARTS=len(parts))


def _launch(
    kernel: Any,
    like: Tensor,
    tensors: tuple[Tensor, ...],
    many: tuple[tuple[Tensor, ...], ...] = (),
    *stacked: Tensor,
    **constants: float,
) -> None:
    """Run a kernel over the rows of `like`, on tensors and any number of parts, with their strides."""
    batch, rows, heads, dim = like.shape
    count = batch * rows * heads
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    of_many = [tuple(stride for x in parts for stride in x.stride()[:3]) for parts in many]
    if count:
        grid = (triton.cdiv(count, ROWS),)
        sizes = {"USED": dim, "DIM": triton.next_power_of_2(dim), "ROWS": ROWS}
        kernel[grid](*many, *stacked, *tensors, count, rows, heads, *of_many, *strides, **sizes, **constants)
