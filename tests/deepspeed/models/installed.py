"""Stand-ins of fla, causal-conv1d and mamba-ssm by their signatures, in plain torch, as if installed.

Fused functions, and those of single tokens, raise: no halo and no state would reach them.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import plain
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

CALLS: dict[str, int] = {}


def install() -> None:
    """Put the packages where transformers looks for them: before the code of a model is imported."""
    for package, functions in PACKAGES.items():
        parts = package.split(".")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            if name not in sys.modules:
                module: Any = ModuleType(name)
                module.__path__, module.__spec__ = [], ModuleSpec(name, None, is_package=True)
                sys.modules[name] = module
                if n > 1:
                    setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], module)
        vars(sys.modules[package]).update(functions)


def _called(name: str) -> None:
    CALLS[name] = CALLS.get(name, 0) + 1


def _raises(*_: Any, **__: Any) -> None:
    raise AssertionError("a fused function, or one of single tokens, ran over shards")


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Any, state: Any, norm: bool):
    if state is not None:
        assert state.dtype == torch.float32 and state.is_contiguous()
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).float() for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    out, final = plain.delta_rule(q, k, v.float(), g=g.float(), beta=beta.float(), initial_state=state)
    return out.to(v.dtype), final


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    _called("gated delta rule")
    assert cu_seqlens is None and g.dim() == 3
    out, final = _delta(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel)
    return out, final if output_final_state else None


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    _called("Kimi's delta rule")
    assert cu_seqlens is None and g.dim() == 4 and not use_gate_in_kernel
    out, final = _delta(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel)
    return out, final if output_final_state else None


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
    final_states_out=None, activation=None,
):  # fmt: skip
    _called("convolution")
    assert activation in (None, "silu", "swish") and (weight.dim(), x.dim(), seq_idx) == (2, 3, None)
    out = conv1d(pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1])
    return silu(out) if activation else out


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    _called("Mamba 1")
    assert not return_last_state and u.dtype == delta.dtype == B.dtype == C.dtype == D.dtype == torch.float32
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    out = plain.selective_scan(u, softplus(delta) if delta_softplus else delta, A, B, C, D=D)
    return out if z is None else out * silu(z)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
    return_varlen_states=False,
):  # fmt: skip
    _called("Mamba 2")
    assert z is None and seq_idx is None
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    k, q = (y.repeat_interleave(x.shape[2] // B.shape[2], 2) for y in (B, C))
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    out, final = plain.gated_linear_attention(q, k, x * dt[..., None], dt * A, initial_state=state)
    out = out + D[:, None] * x
    return (out, final.transpose(-1, -2)) if return_final_states else out


PACKAGES = {
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": _raises,
    },
    "fla.ops.kda": {"chunk_kda": chunk_kda, "fused_recurrent_kda": _raises},
    "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": _raises},
    "mamba_ssm.ops.selective_scan_interface": {
        "selective_scan_fn": selective_scan_fn,
        "mamba_inner_fn": _raises,
    },
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": _raises,
    },
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": _raises},
}
