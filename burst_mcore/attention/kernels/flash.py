"""The flash-attn packages: 2 (`flash_attn`), 3 (`flash_attn_interface`), 4 (`flash_attn.cute`).

These are low-level forwards and backwards, which take and return the log-sum-exp. Written after the sources
of 2.6.0 to 2.8.3, of both signatures of version 3, and of 4.0.0b36.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_mcore import packages
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.aten import (
    ABILITIES,
    from_lower_right,
    half_on_cuda,
    is_causal,
    kept,
    keywords,
    takes_flat,
)
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores
from burst_mcore.attention.kernels.wrappers import takes_any_value_dim


def _arguments(pattern: Pattern, q: Tensor, scores: Scores) -> dict[str, Any]:
    """Return the arguments by name that the functions of versions 2 and 3 share: see `packages.call`."""
    left, right = from_lower_right(pattern)
    window = {"window_size": (left, right), "window_size_left": left, "window_size_right": right}
    scaled = {"softmax_scale": scores.scale, "softcap": _softcap(scores)}
    return {"causal": is_causal(pattern), **window, **scaled, **keywords(pattern, q)}


def _flash2() -> Any:
    return packages.loaded("flash_attn.flash_attn_interface", "flash-attn", "2.6", "2.9")


def _flash2_supports(problem: Problem) -> str | None:
    reason = half_on_cuda(problem, largest_head_dim=256) or packages.not_on((8, 9, 10, 12))
    return reason or packages.missing(_flash2())


def _flash2_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    arguments, of = _arguments(pattern, q, scores), "_varlen" if pattern.packed else ""
    results = packages.call(
        getattr(_flash2(), f"_flash_attn{of}_forward"),
        q, k, v, **arguments, dropout_p=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    out, lse = results[0], results[5 if len(results) == 8 else 1]  # 8 results before 2.7
    left, right = arguments["window_size"]
    if left >= 0 or right > 0:  # the kernel returns +inf for rows without a key
        lse.masked_fill_(lse == torch.inf, -torch.inf)
    return out, lse


def _flash2_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    gradients = _room(inputs)
    of = "_varlen" if pattern.packed else ""
    packages.call(
        getattr(_flash2(), f"_flash_attn{of}_backward"),
        inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, *gradients,
        **_arguments(pattern, inputs.q, scores), dropout_p=0.0, alibi_slopes=None,
        deterministic=scores.deterministic,
    )  # fmt: skip
    return gradients


def _flash3() -> Any:
    return packages.loaded("flash_attn_interface", "flash_attn_3")


def _flash3_supports(problem: Problem) -> str | None:
    reason = half_on_cuda(problem, largest_head_dim=256) or packages.not_on((9,))
    if reason is not None:
        return reason
    dims = problem.head_dim, problem.value_dim
    if dims[0] != dims[1] and not (128 < dims[0] <= 192 and 96 < dims[1] <= 128):
        return f"head dims {dims[0]} and {dims[1]}: those of q, k and v may differ as 192 and 128 do"
    if problem.deterministic and max(dims) > 192:
        return f"it is deterministic up to head dim 192, not with {max(dims)}"
    return packages.missing(_flash3())


def _flash3_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    out, lse, *_ = packages.call(
        _flash3()._flash_attn_forward, q, k, _rows_dense(v), **_arguments(pattern, q, scores)
    )
    return out, lse


def _flash3_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    dq, dk, dv = _room(inputs)
    packages.call(
        _flash3()._flash_attn_backward,
        inputs.dout, inputs.q, inputs.k, _rows_dense(inputs.v), inputs.out, inputs.lse, dq=dq, dk=dk,
        dv=dv, **_arguments(pattern, inputs.q, scores), is_causal=is_causal(pattern),
        deterministic=scores.deterministic,
    )  # fmt: skip
    return dq, dk, dv


def _flash4() -> Any:
    return packages.loaded("flash_attn.cute.interface", "flash-attn-4", "4.0", "5")


def _flash4_supports(problem: Problem) -> str | None:
    reason = half_on_cuda(problem, largest_head_dim=256) or packages.not_on((9, 10, 11))
    if reason is not None:
        return reason
    dims, capability = (problem.head_dim, problem.value_dim), packages.capability()
    if dims[0] != dims[1] and problem.heads != problem.kv_heads:
        return f"head dims {dims[0]} and {dims[1]} differ, which its backward takes without GQA only"
    if capability is not None and capability[0] != 9 and max(dims) > 128 and dims != (192, 128):
        return f"head dims {dims}; on this GPU it takes up to 128, and 192 with 128"
    if problem.deterministic and capability is not None and capability[0] == 9:
        return "it is deterministic on Blackwell only"
    module = _flash4()
    if isinstance(module, str):
        return module
    known = dict(packages.parameters(module._flash_attn_bwd))
    names = [name for name in ("dlse", "deterministic") if name not in known]
    return f"this flash-attn-4's backward has no {', '.join(names)}" if names else None


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    left, right = (None if bound < 0 else bound for bound in from_lower_right(pattern))
    out, lse, *_ = _flash4()._flash_attn_fwd(
        q, k, v, **keywords(pattern, q), softmax_scale=scores.scale,
        causal=is_causal(pattern), softcap=scores.softcap, window_size_left=left, window_size_right=right,
        return_lse=True,
    )  # fmt: skip
    return out, lse


def _flash4_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    left, right = (None if bound < 0 else bound for bound in from_lower_right(pattern))
    dout, q, k, v, _, lse, delta = inputs  # its D is rowsum(dO O) - dLSE
    nothing = kept(_zeros, dout.shape[-1], dout.dtype, device=dout.device).expand_as(dout)
    dq, dk, dv, *_ = _flash4()._flash_attn_bwd(
        q, k, v, nothing, dout, lse, softmax_scale=scores.scale,
        causal=is_causal(pattern), softcap=_softcap(scores), window_size_left=left, window_size_right=right,
        deterministic=scores.deterministic, dlse=-delta, **keywords(pattern, q),
    )  # fmt: skip
    return dq, dk, dv


def _zeros(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(width, dtype=dtype, device=device)


def _softcap(scores: Scores) -> float:
    return scores.softcap or 0.0


def _rows_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _room(inputs: BackwardInputs) -> Gradients:
    dq, dk, dv = (
        torch.empty_like(y, memory_format=torch.contiguous_format) for y in (inputs.q, inputs.k, inputs.v)
    )
    return dq, dk, dv


FLASH2 = Kernel("flash2", _flash2_supports, _flash2_forward, _flash2_backward, abilities=ABILITIES)
FLASH3 = Kernel("flash3", _flash3_supports, _flash3_forward, _flash3_backward, abilities=ABILITIES)
FLASH4 = Kernel(
    "flash4", _flash4_supports, _flash4_forward, _flash4_backward, takes_delta=True, abilities=ABILITIES
)
KERNELS = takes_any_value_dim(takes_flat(FLASH2)), takes_flat(FLASH3), takes_flat(FLASH4)
