"""The flash kernels that torch ships: on CPU, and on CUDA through cuDNN and FlashAttention-2.

Their backwards take the forward's out only to form delta, so any tensor of the same rowsum serves.
They speak [B, H, S, D]; transposed views are passed, nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.kernels.kernel import Kernel, Problem, RowGradients, Window

_aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _same_dim(problem: Problem) -> str | None:
    if problem.head_dim != problem.value_dim:
        return f"head dims differ (q, k {problem.head_dim}, v {problem.value_dim})"
    return None


def _cpu_supports(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"tensors are on {problem.device}, not on cpu"
    if problem.dtype not in (torch.float32, torch.float64, *HALF):
        return f"dtype {problem.dtype}"
    return _same_dim(problem)


def _cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert window is None
    q, k, v = _heads_first(q, k, v)
    bias = None if mask is None else _bias(mask, q.dtype)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    if mask is not None:  # rows that see nothing have a lse of 0
        lse.masked_fill_(~mask.any(1), -torch.inf)
    return out.transpose(1, 2), lse


def _cpu_backward(
    x: RowGradients,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window is None and x.out is not None
    dout, q, k, v, out = _heads_first(x.dout, x.q, x.k, x.v, x.out)
    bias, lse = None, x.lse
    if mask is not None:
        bias, lse = _bias(mask, q.dtype), lse.masked_fill(lse == -torch.inf, 0.0)  # (-inf) - (-inf) is NaN
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores [M, N]."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _cuda_supports(problem: Problem, largest_head_dim: int) -> str | None:
    if problem.device != "cuda":
        return f"tensors are on {problem.device}, not on cuda"
    if problem.dtype not in HALF:
        return f"dtype {problem.dtype}, it takes float16 and bfloat16"
    if problem.head_dim % 8 or problem.head_dim > largest_head_dim:
        return f"head dim {problem.head_dim}, it takes multiples of 8 up to {largest_head_dim}"
    return _same_dim(problem)


def _expanded(x: Tensor, heads: int) -> Tensor:
    """K or V [B, H, S, D] repeated to `heads` heads, on this device only, for kernels without GQA."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _folded(gradient: Tensor, kv_heads: int) -> Tensor:
    """The gradient of what `_expanded` repeated: summed over each group of query heads."""
    if gradient.shape[1] == kv_heads:
        return gradient
    grouped: Tensor = gradient.unflatten(1, (kv_heads, -1))
    return grouped.sum(2, dtype=torch.float32).to(gradient.dtype)


def _no_seed(x: Tensor) -> Tensor:
    """The dropout seed and offset of a call without dropout."""
    return torch.zeros((), dtype=torch.int64, device=x.device)


def _flash_supports(problem: Problem) -> str | None:
    return _cuda_supports(problem, largest_head_dim=256)


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert window is None and mask is None
    q, k, v = _heads_first(q, k, v)
    k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse


def _flash_backward(
    x: RowGradients,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window is None and mask is None and x.out is not None
    dout, q, k, v, out = _heads_first(x.dout, x.q, x.k, x.v, x.out)
    kv_heads = k.shape[1]
    k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    seed = _no_seed(q)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, x.lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed,
        scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), _folded(dk, kv_heads).transpose(1, 2), _folded(dv, kv_heads).transpose(1, 2)


def _cudnn_supports(problem: Problem) -> str | None:
    return _cuda_supports(problem, largest_head_dim=128)


def _cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert window is None and mask is None
    q, k, v = _heads_first(q, k, v)
    k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def _cudnn_backward(
    x: RowGradients,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window is None and mask is None and x.out is not None
    dout, q, k, v, out = _heads_first(x.dout, x.q, x.k, x.v, x.out)
    kv_heads = k.shape[1]
    k, v = _expanded(k, q.shape[1]), _expanded(v, q.shape[1])
    seed = _no_seed(q)
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, x.lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, q.shape[2],
        k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), _folded(dk, kv_heads).transpose(1, 2), _folded(dv, kv_heads).transpose(1, 2)


KERNELS = (
    Kernel("aten-cpu", _cpu_supports, _cpu_forward, _cpu_backward, takes_delta=False, masks=True),
    Kernel("cudnn", _cudnn_supports, _cudnn_forward, _cudnn_backward, takes_delta=False),
    Kernel("aten-flash", _flash_supports, _flash_forward, _flash_backward, takes_delta=False),
)
