"""Pads head dimensions, so that kernels serve shapes and gradients that they do not support themselves.

Zeros change no score and no output, so that a kernel which wants values as wide as keys gets both padded.
A column in which dO is 1 and V is 0 adds to D what `out` holds there, and nothing else: so a kernel that
forms D from out can be given any D (one through which a gradient of lse came, too), in two columns, D and
what rounding took from it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.kernels.kernel import Kernel, Problem, RowGradients, Scores

COLUMNS = 8
"""Head columns that are added for D: kernels want multiples of 8."""


def padded(x: Tensor, dim: int) -> Tensor:
    """x [..., D] with zeros up to `dim` columns."""
    return x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))


def takes_any_value_dim(kernel: Kernel) -> Kernel:
    """`kernel`, which serves equal head dims only, for values that are narrower or wider than keys."""

    def supports(problem: Problem) -> str | None:
        dim = max(problem.head_dim, problem.value_dim)
        return kernel.supports(replace(problem, head_dim=dim, value_dim=dim))

    def forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
        width = v.shape[-1]
        dim = max(q.shape[-1], width)
        out, lse = kernel.forward(padded(q, dim), padded(k, dim), padded(v, dim), seen, how)
        return out[..., :width], lse

    def backward(x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
        width, value_width = x.q.shape[-1], x.v.shape[-1]
        if width == value_width:
            return kernel.backward(x, seen, how)
        wide = _padded_to(x, max(width, value_width))
        dq, dk, dv = kernel.backward(wide, seen, how)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]

    return replace(kernel, supports=supports, forward=forward, backward=backward)


def takes_delta(kernel: Kernel) -> Kernel:
    """`kernel`, which forms D from out, for a D that is given."""
    if kernel.takes_delta:
        return kernel

    def supports(problem: Problem) -> str | None:
        wider = replace(
            problem,
            head_dim=problem.head_dim + COLUMNS,
            value_dim=problem.value_dim + COLUMNS,
        )
        reason = kernel.supports(wider)
        return reason and f"{reason} (with {COLUMNS} columns more, for the gradient of lse)"

    def backward(x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
        width, value_width = x.q.shape[-1], x.v.shape[-1]
        dout = padded(x.dout, value_width + COLUMNS)
        out, delta = torch.zeros_like(dout), x.delta.transpose(1, 2)
        scale = 256.0 if dout.dtype == torch.float16 else 1.0  # D of scaled losses is beyond float16
        dout[..., value_width : value_width + 2] = scale
        out[..., value_width] = delta / scale
        out[..., value_width + 1] = delta / scale - out[..., value_width].to(delta.dtype)  # what was rounded
        wide = x._replace(
            q=padded(x.q, width + COLUMNS),
            k=padded(x.k, width + COLUMNS),
            v=padded(x.v, value_width + COLUMNS),
            dout=dout,
            out=out,
        )
        dq, dk, dv = kernel.backward(wide, seen, how)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]

    return replace(kernel, supports=supports, backward=backward, takes_delta=True)


def _padded_to(x: RowGradients, dim: int) -> RowGradients:
    assert x.out is not None
    return x._replace(
        q=padded(x.q, dim),
        k=padded(x.k, dim),
        v=padded(x.v, dim),
        dout=padded(x.dout, dim),
        out=padded(x.out, dim),
    )
