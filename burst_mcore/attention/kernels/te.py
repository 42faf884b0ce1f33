"""TransformerEngine's fused attention (cuDNN), 2.0 and later.

Its low-level forward and backward, with the softmax statistics among the tensors that pass between them.
Written after the sources of 2.0 to 2.18.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_mcore import packages
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels import aten, reference
from burst_mcore.attention.kernels.aten import half_on_cuda
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Problem, Scores
from burst_mcore.attention.kernels.padding import takes_any_value_dim
from burst_mcore.attention.kernels.small import leaves_small_tiles

LAYOUT = "bshd_bshd_bshd"


def _te() -> Any:
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    return packages.loaded(module, "transformer_engine", "2.0", "3")


def _supports(problem: Problem) -> str | None:
    if problem.softcap:
        return "it has no softcap"
    reason = half_on_cuda(problem, largest_head_dim=128) or packages.not_on((8, 9, 10))
    if reason is not None:
        return reason
    module = _te()
    return module if isinstance(module, str) else None


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
    te = _te()
    q, k, v = (x.contiguous() for x in (q, k, v))  # it reads by the layout's name, not by strides
    out, aux, *_ = packages.call(
        te.fused_attn_fwd, True, q.shape[1], k.shape[1], _ends(q), _ends(k), q, k, v, q.dtype,
        te.FusedAttnBackend["F16_arbitrary_seqlen"], attn_scale=scores.scale, dropout=0.0, qkv_layout=LAYOUT,
        attn_bias_type="no_bias", attn_mask_type="causal" if pattern.causal else "no_mask",
        if_there={"o_format": "bshd"},
    )  # fmt: skip
    return out, aux[0].squeeze(-1)


def _backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    te = _te()
    q, k, v, out, dout = (
        y.contiguous() for y in (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout) if y is not None
    )
    no_seed = torch.zeros(2, dtype=torch.int64, device=q.device)
    statistics = [inputs.lse.unsqueeze(-1).contiguous(), no_seed]
    backend, run = te.FusedAttnBackend["F16_arbitrary_seqlen"], te.fused_attn_bwd
    tensors = (q.shape[1], k.shape[1], _ends(q), _ends(k), q, k, v, out, dout, q.dtype)
    typed = (_te_dtype(q.dtype),) if packages.has(run, "dqkv_dtype") else ()
    dq, dk, dv, *_ = packages.call(
        run, *tensors, *typed, statistics, backend, attn_scale=scores.scale, dropout=0.0, qkv_layout=LAYOUT,
        attn_bias_type="no_bias", attn_mask_type="causal" if pattern.causal else "no_mask",
        deterministic=scores.deterministic,
        if_there={"o_format": "bshd", "do_format": "bshd", "dqkv_layout": LAYOUT},
    )  # fmt: skip
    return dq, dk, dv


def _ends(x: Tensor) -> Tensor:
    """Return cu_seqlens of a batch of full sequences."""
    batch, rows = x.shape[:2]
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=x.device)


def _te_dtype(dtype: torch.dtype) -> Any:
    constants = packages.loaded("transformer_engine.pytorch.constants", "transformer_engine")
    return constants.TE_DType[dtype]


def _for_small_tiles(scores: Scores) -> Kernel:
    return reference.KERNEL if scores.deterministic else aten.FLASH


KERNEL = takes_any_value_dim(
    leaves_small_tiles(Kernel("te", _supports, _forward, _backward, takes_delta=False), _for_small_tiles)
)
