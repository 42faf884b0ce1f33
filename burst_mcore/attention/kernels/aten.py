"""The flash kernels that torch ships: on CPU, and on CUDA through cuDNN and FlashAttention-2.

Their backwards take the forward's out only to form delta, so any tensor of the same rowsum serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels.finite import keeps_nan_where_seen
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores
from burst_mcore.attention.kernels.packed import (
    Sequences,
    flat,
    flat_inputs,
    from_lower_right,
    gradients_of_batch,
    is_causal,
    kept,
    of_batch,
    sequences,
)
from burst_mcore.attention.kernels.shapes import leaves_small_tiles, takes_any_value_dim

_aten = torch.ops.aten
_cpu_flash: Callable[..., Results] = torch._scaled_dot_product_flash_attention_for_cpu  # by _aten: 2 us more
_no_seed = partial(torch.zeros, dtype=torch.int64)  # dropout seed and offset of a call without dropout
HALF = (torch.float16, torch.bfloat16)
LARGE = 16.0
"""The largest log-sum-exp whose rounding in float32 is no more than that of the kernel's other steps. Scores
of a normal distribution exceed it from 5M keys on. With 19 dq became three times less exact."""


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return [B, S, H, D] as views [B, H, S, D]."""
    return tuple([x.transpose(1, 2) for x in tensors])


def _cpu_supports(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"tensors are on {problem.device}, not on cpu"
    if problem.dtype not in (torch.float32, torch.float64, *HALF):
        return f"dtype {problem.dtype}"
    if problem.softcap:
        return "it has no softcap"
    return None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    mask = pattern.table_on(q.device) if pattern.masked else None
    bias, heads = _bias(mask, q.dtype), _heads_first(q, k, v)
    out, lse = _cpu_attention(heads, bias, pattern, scores)
    if q.dtype == torch.float32 and not float(torch.linalg.vector_norm(lse, torch.inf)) <= LARGE:
        # Rounded to float32, it is too rough for a merge: see `of_parts`. Less that, which changes no output,
        # it is small. Scores in backward keep their rounding. A table of a tile is copied for each head here.
        rough = lse.nan_to_num(0.0, 0.0, 0.0)
        less = -rough[..., None]
        out, rest = _cpu_attention(heads, less if bias is None else bias + less, pattern, scores)
        lse = rough.double() + rest
    if mask is not None:  # rows that see nothing have a lse of 0
        lse.masked_fill_(~mask.any(1), -torch.inf)
    return out.transpose(1, 2), lse


def _cpu_attention(
    heads: tuple[Tensor, ...], bias: Tensor | None, pattern: Pattern, scores: Scores
) -> Results:
    return _cpu_flash(*heads, 0.0, pattern.causal, attn_mask=bias, scale=scores.scale)


def _cpu_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    assert inputs.out is not None
    dout, q, k, v, out = _heads_first(inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out)
    mask, lse = pattern.table_on(q.device) if pattern.masked else None, inputs.lse
    if mask is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # (-inf) - (-inf) is NaN
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, pattern.causal, attn_mask=_bias(mask, q.dtype), scale=scores.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the numbers that are added to the scores [M, N]; None without a mask."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def half_on_cuda(problem: Problem, largest_head_dim: int) -> str | None:
    """Return why a kernel for float16 and bfloat16 on CUDA cannot serve; None if it can."""
    if problem.device != "cuda":
        return f"tensors are on {problem.device}, not on cuda"
    if problem.dtype not in HALF:
        return f"dtype {problem.dtype}, it takes float16 and bfloat16"
    dim = max(problem.head_dim, problem.value_dim)
    if problem.head_dim % 8 or problem.value_dim % 8 or dim > largest_head_dim:
        return f"head dim {dim}, it takes multiples of 8 up to {largest_head_dim}"
    return None


def _flash_supports(problem: Problem) -> str | None:
    if problem.softcap:
        return "torch gives no way to its softcap"
    if problem.deterministic:
        return "it is deterministic only under a switch of torch's, which may be another in backward"
    return half_on_cuda(problem, largest_head_dim=256)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    left, right = from_lower_right(pattern)
    out, lse, *_ = _aten._flash_attention_forward(
        *flat(pattern, q, k, v), *_ends(pattern, q, k), 0.0, is_causal(pattern), False,
        scale=scores.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return of_batch(pattern, out, lse, len(q))


def _flash_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    left, right = from_lower_right(pattern)
    seed, given = kept(_no_seed, (), device=inputs.q.device), flat_inputs(pattern, inputs)
    gradients = _aten._flash_attention_backward(
        given.dout, given.q, given.k, given.v, given.out, given.lse, *_ends(pattern, inputs.q, inputs.k),
        0.0, is_causal(pattern), seed, seed, scale=scores.scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    return gradients_of_batch(pattern, gradients, len(inputs.q))


def _ends(pattern: Pattern, q: Tensor, k: Tensor) -> Sequences:
    """Return the sequences of a call: of a packed pattern its own, else whole rows."""
    return sequences(pattern, q) if pattern.packed else Sequences(None, None, q.shape[1], k.shape[1])


def _cudnn_supports(problem: Problem) -> str | None:
    if problem.softcap:
        return "torch gives no way to a softcap"
    if problem.deterministic:
        return "its gradients are not known to be deterministic"
    if problem.documents:
        return (
            "documents give its tiles new shapes in every call, and it plans a shape for up to 0.2 s: choose "
            "'aten-flash', 'flash2', 'flash3', 'flash4', 'te' or 'triton'"
        )
    return half_on_cuda(problem, largest_head_dim=128)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, pattern.causal, scale=scores.scale
    )
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def _cudnn_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    assert inputs.out is not None
    # torch keeps the plan that it made for tensors of these sizes, whatever the strides of dout and out then.
    dout, q, k, v, out = _heads_first(
        inputs.dout.contiguous(), inputs.q, inputs.k, inputs.v, inputs.out.contiguous()
    )
    seed = kept(_no_seed, (), device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, inputs.lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, q.shape[2],
        k.shape[2], 0.0, pattern.causal, scale=scores.scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


CPU = Kernel("aten-cpu", _cpu_supports, _cpu_forward, _cpu_backward, abilities=Abilities(masks=True))
CUDNN = Kernel("cudnn", _cudnn_supports, _cudnn_forward, _cudnn_backward)
FLASH = Kernel(
    "aten-flash",
    _flash_supports,
    _flash_forward,
    _flash_backward,
    abilities=Abilities(windows=True, packed=True),
)
KERNELS = tuple(
    map(
        takes_any_value_dim,
        (keeps_nan_where_seen(CPU), leaves_small_tiles(CUDNN, lambda scores: FLASH), FLASH),
    )
)
