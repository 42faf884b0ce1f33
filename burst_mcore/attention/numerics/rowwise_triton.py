"""The passes of `rowwise` as Triton kernels: one program does a few rows of all tensors at once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Rows of a program."""


@triton.jit
def _at(ids, rows, heads, batch_stride, row_stride, head_stride):
    """Return offsets of rows, counted as (batch, row, head)."""
    ids = ids.to(tl.int64)
    head, row, batch = ids % heads, ids // heads % rows, ids // heads // rows
    return batch * batch_stride + row * row_stride + head * head_stride


@triton.jit
def _delta(
    dout, out, delta, count, rows, heads, dout_b, dout_r, dout_h, out_b, out_r, out_h, delta_b, delta_h,
    delta_r, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    there = ids < count
    inside = there[:, None] & (d < USED)[None, :]
    from_dout = dout + _at(ids, rows, heads, dout_b, dout_r, dout_h)[:, None] + d[None, :]
    x = tl.load(from_dout, mask=inside, other=0.0)
    from_out = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    y = tl.load(from_out, mask=inside, other=0.0)
    products = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + _at(ids, rows, heads, delta_b, delta_r, delta_h), products, mask=there)


@triton.jit
def _stand_in(
    dout, delta, out, count, rows, heads, dout_b, dout_r, dout_h, delta_b, delta_h, delta_r, out_b, out_r,
    out_h, FAINT: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    there = ids < count
    inside = there[:, None] & (d < USED)[None, :]
    from_dout = dout + _at(ids, rows, heads, dout_b, dout_r, dout_h)[:, None] + d[None, :]
    x = tl.load(from_dout, mask=inside, other=0.0)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    empty = largest == 0.0
    largest = tl.where(empty, 1.0, largest)
    unit = x / largest[:, None]
    left = tl.load(delta + _at(ids, rows, heads, delta_b, delta_r, delta_h), mask=there, other=0.0) / largest
    faint = tl.sum(unit * unit, 1) * FAINT
    result = unit * 0.0
    for third in tl.static_range(3):
        x = tl.where((d * 3 // USED == third)[None, :], unit, 0.0)
        squares = tl.sum(x * x, 1)
        bears = squares > faint
        factor = tl.where(bears, left / tl.where(bears, squares, 1.0), 0.0)
        rounded = (x * factor[:, None]).to(out.dtype.element_ty).to(tl.float32)
        left -= tl.sum(x * rounded, 1)
        result += rounded
    to = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(
    out, lse, out_t, lse_t, count, rows, heads, out_b, out_r, out_h, lse_b, lse_h, lse_r, out_t_b, out_t_r,
    out_t_h, lse_t_b, lse_t_h, lse_t_r, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ids, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    there = ids < count
    inside = there[:, None] & (d < USED)[None, :]
    to_out = out + _at(ids, rows, heads, out_b, out_r, out_h)[:, None] + d[None, :]
    to_lse = lse + _at(ids, rows, heads, lse_b, lse_r, lse_h)
    before = tl.load(to_lse, mask=there, other=-float("inf"))
    after = tl.load(lse_t + _at(ids, rows, heads, lse_t_b, lse_t_r, lse_t_h), mask=there, other=-float("inf"))
    most, least = tl.maximum(before, after), tl.minimum(before, after)
    both = least != -float("inf")
    apart = tl.where(both, least - most, 0.0)
    small = tl.where(both, tl.exp(apart), 0.0)  # the smaller share over the larger
    weight = tl.where(after >= before, 1.0, small) / (1.0 + small)
    weight = tl.where(after == -float("inf"), 0.0, weight)
    x = tl.load(to_out, mask=inside, other=0.0).to(tl.float32)
    from_t = out_t + _at(ids, rows, heads, out_t_b, out_t_r, out_t_h)[:, None] + d[None, :]
    y = tl.load(from_t, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_out, (x + weight[:, None] * (y - x)).to(out.dtype.element_ty), mask=inside)
    tl.store(to_lse, most + tl.log(1.0 + small), mask=there)


def delta_rows(dout: Tensor, out: Tensor, delta: Tensor) -> None:
    """Set delta [B, H, S] to rowsum(dout * out)."""
    _launch(_delta, dout, (dout, out, delta))


def stand_in_rows(dout: Tensor, delta: Tensor, out: Tensor, faint: float) -> None:
    """Set out to dout scaled by thirds, with rowsum(dout * out) = delta; thirds below `faint` stay zero."""
    _launch(_stand_in, dout, (dout, delta, out), FAINT=faint)


def merge_rows(out: Tensor, lse: Tensor, out_t: Tensor, lse_t: Tensor) -> None:
    """Merge (out_t, lse_t) into (out, lse)."""
    _launch(_merge, out, (out, lse, out_t, lse_t))


def _launch(kernel: Any, like: Tensor, tensors: tuple[Tensor, ...], **constants: float) -> None:
    batch, rows, heads, dim = like.shape
    count = batch * rows * heads
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    if count:
        grid = (triton.cdiv(count, ROWS),)
        sizes = {"USED": dim, "DIM": triton.next_power_of_2(dim), "ROWS": ROWS}
        kernel[grid](*tensors, count, rows, heads, *strides, **sizes, **constants)
