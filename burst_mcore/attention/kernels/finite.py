"""Brings NaN to the rows that see its row, and to no other, in kernels that lose NaN or spread it.

A table may join small pieces of several documents. There a NaN or an infinity of one document would reach
the others: NaN - inf is NaN, and so is 0 x NaN. And where all scores of a row are NaN, a CPU kernel gives 0
for fewer keys than a vector of the machine has numbers (torch 2.13: 7 keys by AVX2, 15 by AVX-512).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Results, Scores

NARROW = 32
"""Tiles of fewer keys may lose NaN: as many 2-byte numbers as the widest vectors of CPUs, 64 bytes, hold."""


def keeps_nan_where_seen(kernel: Kernel) -> Kernel:
    """Return `kernel`, changed so that a row which is not finite spoils only the rows and keys that meet it.

    In tiles with a table, and in narrow ones, such rows are computed as zeros, and results of rows that meet
    them become NaN. A row that sees nothing stays as it is computed. Where all is finite, the cost is a sum
    over the inputs.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
        if not (pattern.masked or k.shape[1] < NARROW) or _finite(q, k, v):
            return kernel.forward(q, k, v, pattern, scores)
        table = pattern.table_on(q.device)
        rows, columns = _spoiled(q), _spoiled(k, v)
        zeroed = _zeroed(q, rows), _zeroed(k, columns), _zeroed(v, columns)
        out, lse, *_ = kernel.forward(*zeroed, pattern, scores)
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
    """Return whether all is finite; a sum that overflows counts as not finite."""
    return all([math.isfinite(x.sum() if x.itemsize > 2 else x.sum(dtype=torch.float32)) for x in tensors])


def _spoiled(*tensors: Tensor) -> Tensor:
    """Return [B, S]: whether a row of [B, S, H, D] is not finite in any of these."""
    return torch.stack([~x.isfinite().flatten(2).all(2) for x in tensors]).any(0)


def _zeroed(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows[:, :, None, None], 0.0)


def _meet(spoiled: Tensor, table: Tensor) -> Tensor:
    """Return [B, N]: which columns meet spoiled rows [B, M], by a table [M, N]."""
    return (spoiled.float() @ table.float()) > 0
