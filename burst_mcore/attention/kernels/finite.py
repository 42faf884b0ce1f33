"""Tables of what is seen, for kernels that add minus infinity to scores: NaN passes through those.

A table may join small pieces of several documents. There a NaN or an infinity of one document would reach
the others: NaN - inf is NaN, and so is 0 x NaN.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.kernels.kernel import Kernel, RowGradients, Scores


def keeps_nan_where_seen(kernel: Kernel) -> Kernel:
    """`kernel`, in which a row that is not finite spoils only the rows and keys that meet it.

    In tiles with a table, such rows are computed as zeros; what meets them becomes NaN. A row that sees
    nothing stays as it is computed. Costs a sum over the inputs of those tiles where all is finite.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
        if not seen.masked or _finite(q, k, v):
            return kernel.forward(q, k, v, seen, how)
        table = seen.table_on(q.device)
        rows, columns = _spoiled(q), _spoiled(k, v)
        out, lse = kernel.forward(_zeroed(q, rows), _zeroed(k, columns), _zeroed(v, columns), seen, how)
        spoiled = (rows & table.any(1)) | _meet(columns, table.T)
        out[spoiled] = torch.nan
        lse.masked_fill_(spoiled[:, None], torch.nan)
        return out, lse

    def backward(x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
        given = [y for y in (x.dout, x.q, x.k, x.v, x.out) if y is not None]
        if not seen.masked or (
            _finite(*given, x.delta) and not bool((x.lse.isnan() | (x.lse == torch.inf)).any())
        ):
            return kernel.backward(x, seen, how)
        rows = _spoiled(*(y for y in (x.dout, x.q, x.out) if y is not None))
        rows |= (~x.delta.isfinite() | x.lse.isnan() | (x.lse == torch.inf)).any(1)
        columns, table = _spoiled(x.k, x.v), seen.table_on(x.q.device)
        clean = RowGradients(
            dout=_zeroed(x.dout, rows),
            q=_zeroed(x.q, rows),
            k=_zeroed(x.k, columns),
            v=_zeroed(x.v, columns),
            out=None if x.out is None else _zeroed(x.out, rows),
            lse=x.lse.masked_fill(rows[:, None], 0.0),
            delta=x.delta.masked_fill(rows[:, None], 0.0),
        )
        dq, dk, dv = kernel.backward(clean, seen, how)
        dq[(rows & table.any(1)) | _meet(columns, table.T)] = torch.nan
        for gradient in (dk, dv):
            gradient[(columns & table.any(0)) | _meet(rows, table)] = torch.nan
        return dq, dk, dv

    return replace(kernel, forward=forward, backward=backward)


def _finite(*tensors: Tensor) -> bool:
    """Whether all is finite; sums that overflow say no as well."""
    return all(bool(x.sum(dtype=torch.float64).isfinite()) for x in tensors)


def _spoiled(*tensors: Tensor) -> Tensor:
    """[B, S]: whether a row of [B, S, H, D] is not finite in any of these."""
    return torch.stack([~x.isfinite().flatten(2).all(2) for x in tensors]).any(0)


def _zeroed(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows[:, :, None, None], 0.0)


def _meet(spoiled: Tensor, table: Tensor) -> Tensor:
    """[B, N]: what sees, or is seen by, spoiled rows [B, M], by a table [M, N]."""
    return (spoiled.float() @ table.float()) > 0
