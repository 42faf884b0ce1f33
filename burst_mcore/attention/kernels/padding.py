"""Pads head dimensions, so that kernels serve shapes and gradients that they do not support themselves.

Zeros change no score and no output, so a kernel that wants values as wide as keys gets both padded. A column
in which dO is 1 and V is 0 adds to D the number that `out` has there, and changes nothing else. So a kernel
that forms D from out can be given any D, also one with a gradient through lse. Two columns carry it: D, and
the part of D that was lost to rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Problem, Scores

COLUMNS = 8
"""Head columns that are added for D: kernels want multiples of 8."""


def padded(x: Tensor, dim: int) -> Tensor:
    """Return x [..., D] with zeros up to `dim` columns."""
    return x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))


def takes_any_value_dim(kernel: Kernel) -> Kernel:
    """Return `kernel`, which serves equal head dims only, for values narrower or wider than keys."""

    def supports(problem: Problem) -> str | None:
        dim = max(problem.head_dim, problem.value_dim)
        return kernel.supports(replace(problem, head_dim=dim, value_dim=dim))

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
        width = v.shape[-1]
        if q.shape[-1] == width:
            return kernel.forward(q, k, v, pattern, scores)
        dim = max(q.shape[-1], width)
        out, lse = kernel.forward(padded(q, dim), padded(k, dim), padded(v, dim), pattern, scores)
        return out[..., :width], lse

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        width, value_width = inputs.q.shape[-1], inputs.v.shape[-1]
        if width == value_width:
            return kernel.backward(inputs, pattern, scores)
        wide = _padded_to(inputs, max(width, value_width))
        dq, dk, dv = kernel.backward(wide, pattern, scores)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]

    return replace(kernel, supports=supports, forward=forward, backward=backward)


def takes_delta(kernel: Kernel) -> Kernel:
    """Return `kernel`, which forms D from out, as a kernel that is given D."""
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

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        width, value_width = inputs.q.shape[-1], inputs.v.shape[-1]
        dout = padded(inputs.dout, value_width + COLUMNS)
        out, delta = torch.zeros_like(dout), inputs.delta.transpose(1, 2)
        scale = 256.0 if dout.dtype == torch.float16 else 1.0  # D of scaled losses is beyond float16
        dout[..., value_width : value_width + 2] = scale
        out[..., value_width] = delta / scale
        out[..., value_width + 1] = delta / scale - out[..., value_width].to(delta.dtype)  # rounding error
        wide = inputs._replace(
            q=padded(inputs.q, width + COLUMNS),
            k=padded(inputs.k, width + COLUMNS),
            v=padded(inputs.v, value_width + COLUMNS),
            dout=dout,
            out=out,
        )
        dq, dk, dv = kernel.backward(wide, pattern, scores)
        return dq[..., :width], dk[..., :width], dv[..., :value_width]

    return replace(kernel, supports=supports, backward=backward, takes_delta=True)


def _padded_to(inputs: BackwardInputs, dim: int) -> BackwardInputs:
    assert inputs.out is not None
    return inputs._replace(
        q=padded(inputs.q, dim),
        k=padded(inputs.k, dim),
        v=padded(inputs.v, dim),
        dout=padded(inputs.dout, dim),
        out=padded(inputs.out, dim),
    )
