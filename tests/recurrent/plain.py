"""Recurrences in plain torch, token by token, in any dtype: what kernels compute."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp g_t) S_(t-1), plus beta_t k_t (v_t - k_t S)^T; out_t = q_t S_t.

    g is [B, S, H], or [B, S, H, K] for Kimi's; the state is [B, H, K, V].
    """
    state = _state(k, v, initial_state)
    outs = []
    for t in range(q.shape[1]):
        state = state * _row(g[:, t]).exp()
        error = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_(t-1) + k_t v_t^T; out_t = q_t S_t. With g [B, S, H] this is lightning attention."""
    state = _state(k, v, initial_state)
    outs = []
    for t in range(q.shape[1]):
        state = state * _row(g[:, t]).exp() + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def selective_scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor) -> Tensor:
    """S_t = exp(dt_t A) S_(t-1) + dt_t u_t B_t^T; out_t = S_t C_t + D u_t: mamba-ssm's, without a state."""
    state, outs = u.new_zeros(*u.shape[:2], A.shape[-1]), []
    for t in range(u.shape[-1]):
        step = dt[..., t, None]
        state = state * (step * A.to(u)).exp() + step * u[..., t, None] * B[:, None, :, t]
        outs.append((state @ C[:, :, t, None])[..., 0])
    return torch.stack(outs, -1) + D.to(u)[:, None] * u


def _state(k: Tensor, v: Tensor, initial: Tensor | None) -> Tensor:
    if initial is not None:
        return initial
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])


def _row(g: Tensor) -> Tensor:
    """Return a gate of a head, or of each of its K rows, as it multiplies a state."""
    return g[..., None] if g.dim() == 3 else g[..., None, None]
