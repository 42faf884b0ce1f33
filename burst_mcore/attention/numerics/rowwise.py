"""What is done row by row around the kernels: D, the stand-in for O, and the merge of partial outputs.

Each is one pass over its tensors: by a Triton kernel on CUDA, elsewhere over blocks of rows small enough that
what is computed on the way stays in the cache. Bytes of a row of d elements of s bytes, read and written
once: D 2 d s + 4; the stand-in 2 d s + 4; the merge d (s + 8) + 12. Tensors are [B, S, H, D], statistics
[B, H, S].
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burst_mcore.dtypes import wide

logger = logging.getLogger("burst_mcore")

BLOCK_BYTES = 2**18
"""Of a block of rows: a few of them fit into a core's cache."""
FAINT = 2.0**-8
"""Of a third of a row, the share of all squares under which it carries nothing: its values would have to be
multiplied by too much."""


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """D = rowsum(dO * O), [B, H, S] in at least float32, contiguous."""
    batch, rows, heads, _ = out.shape
    delta = torch.empty((batch, heads, rows), dtype=wide(out.dtype), device=out.device)
    if _fused(dout, out):
        _code().delta_rows(dout, out, delta)
        return delta
    for at in _blocks(out):
        products = torch.linalg.vecdot(dout[:, at].to(delta.dtype), out[:, at].to(delta.dtype))
        delta[:, :, at] = products.transpose(1, 2)
    return delta


def output_stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor that stands in for O in kernels that read O only to form D: O projected on dO, row by row.

    out' = D dO / |dO|^2, 0 where dO = 0, has rowsum(dO * out') = D and is at most 16 times as large as O,
    so that O need not travel and no kernel be changed. In half precision out' is rounded, and D with it, by
    2^-9 in bfloat16: too much for a row that sees a single key, whose dS = dP - D is 0. So the first third of
    the columns carries D, and each other third what rounding those before took from it; thirds that are
    nearly empty carry nothing. Rows are first scaled to max |dO| = 1, so that squares neither vanish nor
    overflow, however small the loss scale.
    """
    stand_in = torch.empty_like(dout, memory_format=torch.contiguous_format)
    if _fused(dout, stand_in):
        _code().stand_in_rows(dout, delta, stand_in, FAINT)
        return stand_in
    for at in _blocks(dout):
        rows = dout[:, at].to(wide(dout.dtype))
        largest = rows.abs().amax(-1, keepdim=True)
        unit = rows / largest.masked_fill_(largest == 0, 1.0)
        left = delta[:, :, at].transpose(1, 2).unsqueeze(-1) / largest
        faint = FAINT * torch.linalg.vecdot(unit, unit).unsqueeze(-1)
        thirds = (whole.tensor_split(3, dim=-1) for whole in (unit, stand_in[:, at]))
        for x, found in zip(*thirds, strict=True):
            squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
            found.copy_(x * (left / squares).masked_fill_(squares <= faint, 0.0))
            left = left - torch.linalg.vecdot(x, found.to(x.dtype)).unsqueeze(-1)
    return stand_in


def merge_(out: Tensor, lse: Tensor, out_t: Tensor, lse_t: Tensor) -> None:
    """Merge softmax(S_t) V_t into (out, lse) in place, without overflow.

    out, out_t [B, S, H, D] and lse, lse_t [B, H, S], where lse = -inf marks a row that has seen no key yet
    (its out must be finite). Equals softmax over the union of the keys (paper algorithm 4):
    out -= sigmoid(lse_t - lse) * (out - out_t); lse = log(exp(lse) + exp(lse_t)).
    """
    if _fused(out, out_t):
        _code().merge_rows(out, lse, out_t, lse_t)
        return
    for at in _blocks(out):
        weight = torch.sigmoid(lse_t[:, :, at] - lse[:, :, at])
        weight.masked_fill_(lse_t[:, :, at] == -torch.inf, 0.0)  # (-inf) - (-inf) is NaN; nothing came
        out[:, at].lerp_(out_t[:, at].to(out.dtype), weight.transpose(1, 2).unsqueeze(-1).to(out.dtype))
        lse[:, :, at] = torch.logaddexp(lse[:, :, at], lse_t[:, :, at])


def _blocks(x: Tensor) -> Iterator[slice]:
    rows = x.shape[1]
    step = rows
    if x.device.type == "cpu" and rows:
        step = max(1, BLOCK_BYTES * rows // max(1, x.numel() * wide(x.dtype).itemsize))
    return (slice(first, first + step) for first in range(0, rows, max(1, step)))


def _fused(*tensors: Tensor) -> bool:
    """Whether Triton can do it: on CUDA, if it is there; head dims dense in memory, no float64."""
    return all(x.is_cuda and x.stride(-1) == 1 and x.dtype != torch.float64 for x in tensors) and bool(
        _code()
    )


@lru_cache
def _code() -> Any:
    try:
        from burst_mcore.attention.numerics import rowwise_triton
    except ImportError as error:
        logger.warning("no Triton (%s): D, the stand-in for O and the merge take several passes each", error)
        return None
    return rowwise_triton
