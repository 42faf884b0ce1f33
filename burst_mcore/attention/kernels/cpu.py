"""The flash kernel that torch ships for CPUs. Its backward reads out only to form delta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores
from burst_mcore.attention.kernels.wrappers import NARROW, keeps_nan_where_seen, takes_any_value_dim

_flash: Callable[..., Results] = torch._scaled_dot_product_flash_attention_for_cpu
"""Called directly: torch.ops.aten takes 2 us more."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGE = 16.0
"""The maximum log-sum-exp with a rounding error in float32 as small as the kernel's other errors. Scores of a
normal distribution exceed it from 5M keys on. With 19 dq became three times less exact."""


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return [B, S, H, D] as views [B, H, S, D]."""
    return tuple([x.transpose(1, 2) for x in tensors])


def _supports(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"tensors are on {problem.device}, not on cpu"
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype}"
    if problem.softcap:
        return "it has no softcap"
    return None


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    if pattern.masked or k.shape[1] < NARROW or k.shape[3] != v.shape[3]:
        return _CAREFUL.forward(q, k, v, pattern, scores)
    return _plain_forward(q, k, v, pattern, scores)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    mask = pattern.table_on(q.device) if pattern.masked else None
    bias = None if mask is None else _bias(mask, q.dtype)
    attend = partial(_flash, *heads_first(q, k, v), 0.0, pattern.causal, scale=scores.scale)
    out, lse = attend(attn_mask=bias)
    if q.dtype == torch.float32 and not float(torch.linalg.vector_norm(lse, torch.inf)) <= LARGE:
        # lse in float32 is too rough for a merge (see `of_parts`). A second forward with scores S - lse has
        # the same output, and returns the small rest. A tile's table is copied for each head here.
        rough = lse.nan_to_num(0.0, 0.0, 0.0)
        shift = -rough[..., None]
        out, rest = attend(attn_mask=shift if bias is None else bias + shift)
        lse = rough.double() + rest
    if mask is not None:  # the kernel returns lse = 0 for rows without a key
        lse.masked_fill_(~mask.any(1), -torch.inf)
    return out.transpose(1, 2), lse


def _backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    if pattern.masked or inputs.k.shape[3] != inputs.v.shape[3]:
        return _CAREFUL.backward(inputs, pattern, scores)
    return _plain_backward(inputs, pattern, scores)


def _plain_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    assert inputs.out is not None
    dout, q, k, v, out = heads_first(inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out)
    mask, lse = pattern.table_on(q.device) if pattern.masked else None, inputs.lse
    bias = None if mask is None else _bias(mask, q.dtype)
    if mask is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # (-inf) - (-inf) is NaN
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, pattern.causal, attn_mask=bias, scale=scores.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


_PLAIN = Kernel("aten-cpu", _supports, _plain_forward, _plain_backward, abilities=Abilities(masks=True))
_CAREFUL = takes_any_value_dim(keeps_nan_where_seen(_PLAIN))
KERNEL = replace(_PLAIN, forward=_forward, backward=_backward)
KERNELS = (KERNEL,)
