"""The row-wise maths around the kernels: D, the stand-in for O, merges and sums of parts.

Each is one pass over its tensors, by a Triton kernel on CUDA. On the CPU each loops over blocks of rows, so
small that intermediate results stay in the cache. Each row of d elements of s bytes is read and written
once: 2 d s + 4 bytes for D and for the stand-in, and d (n s + r) bytes for the merge of n parts to a result
of r bytes an element. Tensors are [B, S, H, D], D and LSE are [B, H, S].
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, gather
from burst_mcore.dtypes import wide

logger = logging.getLogger("burst_mcore")

BLOCK_BYTES = 2**18
"""Bytes of a block of rows: a few blocks fit into a core's cache."""
FAINT = 2.0**-8
"""The minimum share of a row's sum of squares in a third of the row that carries D. A third with less would
be multiplied by too large a factor."""


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return D = rowsum(dO * O), [B, H, S] in at least float32, contiguous (BurstEngine, algorithm 2).

    D_i = sum_j P_ij dP_ij, the term of the softmax gradient dS = P * (dP - D) that needs whole rows.
    """
    batch, rows, heads, _ = out.shape
    delta = torch.empty((batch, heads, rows), dtype=wide(out.dtype), device=out.device)
    if _fused(dout, out):
        _code().delta_rows(dout, out, delta)
        return delta
    for block in _blocks(out):
        products = torch.linalg.vecdot(*[gather(x, block).to(delta.dtype) for x in (dout, out)])
        gather(delta, block).copy_(products.transpose(1, 2))
    return delta


def output_stand_in(dout: Tensor, delta: Tensor, into: Tensor | None = None) -> Tensor:
    """Return a stand-in for O, for kernels that read O only to form D: O projected on dO.

    out' = D dO / |dO|^2, 0 where dO = 0, has rowsum(dO * out') = D. It is at most 16 times as large as O. So
    O need not rotate, and no kernel need be changed. In bfloat16 rounding changes out', and D with it, by
    2^-9. That is too much for a row with a single key, where dS = dP - D must be 0. So the first third of the
    columns carries D, and each later third the rounding error of the thirds before it. Nearly empty thirds
    carry nothing. Without Triton a float32 row is a single part: 2^-24 is the rounding of D itself. Rows are
    first scaled to max |dO| = 1, so that squares neither vanish nor overflow, at any loss scale.

    into: memory for the result, like dout.
    """
    stand_in = torch.empty_like(dout, memory_format=torch.contiguous_format) if into is None else into
    if _fused(dout, stand_in):
        _code().stand_in_rows(dout, delta, stand_in, FAINT)
        return stand_in
    parts = 1 if dout.dtype == wide(dout.dtype) else 3
    for block in _blocks(dout):
        rows = gather(dout, block).to(wide(dout.dtype))
        largest = rows.abs().amax(-1, keepdim=True)
        unit = rows / largest.masked_fill_(largest == 0, 1.0)
        remainder = gather(delta, block).transpose(1, 2).unsqueeze(-1) / largest
        faint = FAINT * torch.linalg.vecdot(unit, unit).unsqueeze(-1)
        columns = (x.tensor_split(parts, dim=-1) for x in (unit, gather(stand_in, block)))
        for x, part in zip(*columns, strict=True):
            squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
            part.copy_(x * (remainder / squares).masked_fill_(squares <= faint, 0.0))
            remainder = remainder - torch.linalg.vecdot(x, part.to(x.dtype)).unsqueeze(-1)
    return stand_in


def combine(parts: Sequence[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor) -> None:
    """Set (out, lse) to the softmax over the keys of all parts, without overflow.

    lse = log sum_i exp(lse_i) and out = sum_i exp(lse_i - lse) out_i: the merge of the paper's appendix
    ("forward pass of Ring/BurstAttention"), for n parts at once. Each part is a partial (out [B, S, H, D],
    lse [B, H, S]) over disjoint keys, in any dtype; the results may share memory with one part. All parts
    have lse in one dtype, `of_parts` for merges as exact as one kernel. lse = -inf marks a row without keys;
    its out must be finite.
    """
    if len(parts) == 1:
        _copy(parts[0], (out, lse))
        return
    tensors = [x for part in parts for x in part]
    if _fused(out, *tensors[::2]):
        _code().combine_rows(parts, out, lse)
        return
    for block in _blocks(out):
        of_parts = torch.stack([gather(x, block) for x in tensors[1::2]])
        maxima = of_parts.amax(0)
        shifted = of_parts - maxima.masked_fill(maxima == -torch.inf, 0.0)
        weights = shifted.to(wide(tensors[0].dtype)).exp_()
        total = weights.sum(0)
        gather(lse, block).copy_(maxima + total.to(maxima.dtype).log())
        weights /= total.masked_fill_(total == 0.0, 1.0)
        by_row = weights.transpose(2, 3).unsqueeze(-1)
        mixed = gather(tensors[0], block).to(weights.dtype) * by_row[0]
        for weight, x in zip(by_row[1:], tensors[2::2], strict=True):
            mixed.addcmul_(gather(x, block).to(weights.dtype), weight)
        gather(out, block).copy_(mixed)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention over two disjoint sets of keys. Differentiable in all arguments.

    Local to a rank: each rank calls `burst_attention(..., return_lse=True)` for both sets, and merges its
    rows. The weights of both are exp(lse_i - lse) (FlashAttention, Dao et al. 2022, section 3.1).

    Args:
        out, other: [batch, local sequence, heads, value_dim], of one dtype.
        lse, other_lse: [batch, local sequence, heads]; -inf where a query saw no key.

    Returns:
        out in the dtype of `out`, and lse in that of `lse`: zeros and -inf for a query without a key.

    Raises:
        ValueError: the shapes do not match.
    """
    shapes = [tuple(x.shape) for x in (out, lse, other, other_lse)]
    if not shapes[0] == shapes[2] or not shapes[0][:-1] == shapes[1] == shapes[3]:
        raise ValueError(
            f"merge takes two outputs [batch, local sequence, heads, value_dim] of one shape, each with its "
            f"lse [batch, local sequence, heads], got {', '.join(map(str, shapes))}"
        )
    unseen = torch.isneginf(torch.maximum(lse, other_lse))  # 0 instead of -inf keeps gradients finite
    lse, other_lse = lse.masked_fill(unseen, 0.0), other_lse.masked_fill(unseen, 0.0)
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - total).exp().masked_fill(unseen, 0)[..., None] for x in (lse, other_lse))
    merged = weight * out + other_weight * other
    return merged.to(out.dtype), total.masked_fill(unseen, -torch.inf)


def add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """Set total [B, S, H, D] to the sum of the parts, in at least float32; total may be one of them."""
    if len(parts) == 1:
        _copy(parts, (total,))
        return
    if _fused(total, *parts):
        _code().add_rows(parts, total)
        return
    dtype = wide(total.dtype)
    for block in _blocks(total):
        first, *others = (gather(x, block) for x in parts)
        in_place = total is parts[0] and total.dtype == dtype
        sums = first if in_place else first.to(dtype, copy=True)
        for x in others:
            sums += x
        if not in_place:
            gather(total, block).copy_(sums)


def _copy(part: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    for x, y in zip(part, to, strict=True):
        if x is not y:
            y.copy_(x)


def _blocks(x: Tensor) -> list[Rows]:
    rows = step = x.shape[1]
    if x.device.type == "cpu" and rows:
        step = max(1, BLOCK_BYTES * rows // max(1, x.numel() * max(4, x.itemsize)))
    return [(range(first, min(first + step, rows)),) for first in range(0, rows, max(1, step))]


def _fused(*tensors: Tensor) -> bool:
    """Return whether Triton runs these tensors: on CUDA, head dims dense in memory, no float64."""
    supported = [x.is_cuda and x.stride(-1) == 1 and x.dtype != torch.float64 for x in tensors]
    return all(supported) and bool(_code())


@lru_cache
def _code() -> Any:
    try:
        from burst_mcore.attention.numerics import rowwise_triton
    except ImportError as error:
        logger.warning("no Triton (%s): D, its stand-in, merges and sums take several passes each", error)
        return None
    return rowwise_triton
