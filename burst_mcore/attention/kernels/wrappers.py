"""Wrappers that add features to kernels: head dims by padding, any D, small tiles, confined NaN.

Zeros change no score and no output, so a kernel for values as wide as keys gets both padded. A column with
dO = 1 and V = 0 adds the number in `out` to D, and changes nothing else. So a kernel that forms D from out
takes any D, for example with a gradient through lse (D - dLSE). Two columns carry D: its rounded value, and
the rounding error.

cuDNN's backward does not support one row with one key, and its release notes name more small shapes with
faults. Window edges and short documents give such tiles.

A table may join small pieces of several documents. There a NaN or an infinity of one document would reach
the others: NaN - inf is NaN, and so is 0 x NaN. And where all scores of a row are NaN, torch's CPU kernel
returns 0 for fewer keys than a vector register has numbers (torch 2.13: 7 keys by AVX2, 15 by AVX-512).
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores

logger = logging.getLogger("burst_mcore")
NARROW = 32
"""The minimum keys of a tile that keeps NaN: the 2-byte numbers of the widest CPU vectors, 64 bytes."""
COLUMNS = 8
"""The number of head columns added for D: kernels need multiples of 8."""
LEAST = 64
"""The minimum rows and keys of a tile for cuDNN."""


def padded(x: Tensor, dim: int) -> Tensor:
    """Return x [..., D] with zeros up to `dim` columns."""
    return x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))


def takes_any_value_dim(kernel: Kernel) -> Kernel:
    """Return `kernel`, for equal head dims only, extended to values narrower or wider than keys."""

    def supports(problem: Problem) -> str | None:
        dim = max(problem.head_dim, problem.value_dim)
        return kernel.supports(replace(problem, head_dim=dim, value_dim=dim))

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
        width = v.shape[-1]
        if q.shape[-1] == width:
            return kernel.forward(q, k, v, pattern, scores)
        dim = max(q.shape[-1], width)
        out, lse = kernel.forward(padded(q, dim), padded(k, dim), padded(v, dim), pattern, scores)
        return out[..., :width], lse

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
        width, value_width = inputs.q.shape[-1], inputs.v.shape[-1]
        if width == value_width:
            return kernel.backward(inputs, pattern, scores)
        assert inputs.out is not None
        dim = max(width, value_width)
        wide = _padded_to(inputs, dim, dim)._replace(out=padded(inputs.out, dim))
        dq, dk, dv = kernel.backward(wide, pattern, scores)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]

    return replace(kernel, supports=supports, forward=forward, backward=backward)


def takes_delta(kernel: Kernel) -> Kernel:
    """Return `kernel`, which forms D from out, as a kernel with D as an input."""
    if kernel.takes_delta:
        return kernel

    def supports(problem: Problem) -> str | None:
        dims = problem.head_dim + COLUMNS, problem.value_dim + COLUMNS
        reason = kernel.supports(replace(problem, head_dim=dims[0], value_dim=dims[1]))
        return reason and f"{reason} (with {COLUMNS} columns more, for the gradient of lse)"

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
        width, value_width = inputs.q.shape[-1], inputs.v.shape[-1]
        wide = _padded_to(inputs, width + COLUMNS, value_width + COLUMNS)
        dout, out, delta = wide.dout, torch.zeros_like(wide.dout), inputs.delta.transpose(1, 2)
        scale = 256.0 if dout.dtype == torch.float16 else 1.0  # D of scaled losses is beyond float16
        dout[..., value_width : value_width + 2] = scale
        out[..., value_width] = delta / scale
        out[..., value_width + 1] = delta / scale - out[..., value_width].to(delta.dtype)  # rounding error
        dq, dk, dv = kernel.backward(wide._replace(out=out), pattern, scores)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]

    return replace(kernel, supports=supports, backward=backward, takes_delta=True)


def _padded_to(inputs: BackwardInputs, dim: int, value_dim: int) -> BackwardInputs:
    """Return inputs of wider heads; `out` is as before."""
    q, k = padded(inputs.q, dim), padded(inputs.k, dim)
    return inputs._replace(q=q, k=k, v=padded(inputs.v, value_dim), dout=padded(inputs.dout, value_dim))


def leaves_small_tiles(kernel: Kernel, fallback: Kernel) -> Kernel:
    """Return `kernel`, with tiles of fewer than LEAST rows or keys left to another kernel.

    The fallback must support the same problems. The first such tile is logged.
    """

    def chosen(pattern: Pattern) -> Kernel:
        if min(pattern.shape) >= LEAST:
            return kernel
        _tell(kernel.name, fallback.name)
        return fallback

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
        return chosen(pattern).forward(q, k, v, pattern, scores)

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
        return chosen(pattern).backward(inputs, pattern, scores)

    return replace(kernel, forward=forward, backward=backward)


@lru_cache
def _tell(name: str, fallback: str) -> None:
    logger.info("kernel %s: tiles of under %d rows or keys are left to %s", name, LEAST, fallback)


def keeps_nan_where_seen(kernel: Kernel) -> Kernel:
    """Return `kernel`, changed so that a non-finite row spoils only the rows and keys that attend to it.

    In tiles with a table, and in narrow tiles, such rows are computed as zeros, and results of rows that
    attend to them become NaN. A row without a key keeps its result. For finite inputs, the cost is a sum over
    the inputs.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
        if not (pattern.masked or k.shape[1] < NARROW) or _finite(q, k, v):
            return kernel.forward(q, k, v, pattern, scores)
        table = pattern.table_on(q.device)
        rows, columns = _spoiled(q), _spoiled(k, v)
        zeroed = _zeroed(q, rows), _zeroed(k, columns), _zeroed(v, columns)
        out, lse = kernel.forward(*zeroed, pattern, scores)
        spoiled = (rows & table.any(1)) | _meet(columns, table.T)
        out[spoiled] = torch.nan
        lse.masked_fill_(spoiled[:, None], torch.nan)
        return out, lse

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
        if not pattern.masked or (
            _finite(*(y for y in inputs if y is not None and y is not inputs.lse))
            and not bool((inputs.lse.isnan() | (inputs.lse == torch.inf)).any())
        ):
            return kernel.backward(inputs, pattern, scores)
        rows = _spoiled(*(y for y in (inputs.dout, inputs.q, inputs.out) if y is not None))
        rows |= (~inputs.delta.isfinite() | inputs.lse.isnan() | (inputs.lse == torch.inf)).any(1)
        columns, table = _spoiled(inputs.k, inputs.v), pattern.table_on(inputs.q.device)
        clean = BackwardInputs(
            dout=_zeroed(inputs.dout, rows),
            q=_zeroed(inputs.q, rows),
            k=_zeroed(inputs.k, columns),
            v=_zeroed(inputs.v, columns),
            out=None if inputs.out is None else _zeroed(inputs.out, rows),
            lse=inputs.lse.masked_fill(rows[:, None], 0.0),
            delta=inputs.delta.masked_fill(rows[:, None], 0.0),
        )
        dq, dk, dv = kernel.backward(clean, pattern, scores)
        dq[(rows & table.any(1)) | _meet(columns, table.T)] = torch.nan
        for gradient in (dk, dv):
            gradient[(columns & table.any(0)) | _meet(rows, table)] = torch.nan
        return dq, dk, dv

    return replace(kernel, forward=forward, backward=backward)


def _finite(*tensors: Tensor) -> bool:
    """Return whether all numbers are finite; a sum that overflows counts as not finite."""
    return all([math.isfinite(x.sum() if x.itemsize > 2 else x.sum(dtype=torch.float32)) for x in tensors])


def _spoiled(*tensors: Tensor) -> Tensor:
    """Return [B, S]: whether a row of [B, S, H, D] is not finite in any of the tensors."""
    return torch.stack([~x.isfinite().flatten(2).all(2) for x in tensors]).any(0)


def _zeroed(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows[:, :, None, None], 0.0)


def _meet(spoiled: Tensor, table: Tensor) -> Tensor:
    """Return [B, N]: whether a column has a pair with a spoiled row [B, M], by a table [M, N]."""
    return (spoiled.float() @ table.float()) > 0
