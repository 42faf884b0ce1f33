"""What a recurrence needs of a kernel, and adapters to kernels by their signatures.

A kernel that takes a state and returns one is enough: B is the state that it makes of zero. For delta rules A
is the state that the same kernel makes of the identity while values are zero; elsewhere A is a product of
decays. Adapters take the kernel itself, so that one adapter serves all of one signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from burst_mcore.dtypes import wide
from burst_mcore.recurrent.maps import ELEMENTWISE, MATRIX, Algebra

Tensors = tuple[Tensor, ...]
"""Tensors of consecutive tokens, one row a token along `Recurrence.dim`."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence by what its kernel can do."""

    name: str
    algebra: Algebra
    run: Callable[[Tensors, Tensor | None], tuple[Tensor, Tensor]]
    """(tensors, the state before them; None is zero) -> (outputs, the state behind them). Differentiable."""
    decay: Callable[[Tensors], Tensor]
    """A of these tokens. Differentiable."""
    state_shape: Callable[[Tensors], Shape]
    decay_shape: Callable[[Tensors], Shape]
    like: int
    """The number of the tensor that is shaped like the outputs."""
    dim: int = 1

    def cut(self, tensors: Tensors, rows: range) -> Tensors:
        """Return these rows of all tensors."""
        return tuple(x.narrow(self.dim, rows.start, len(rows)) for x in tensors)


def delta_rule(rule: Callable[..., Any], **options: Any) -> Recurrence:
    """Return the recurrence of a (gated, or Kimi's) delta rule, by the signature of fla's chunk kernels.

    Its tensors are q, k [B, S, Hk, K], v [B, S, H, V], g and beta. The state is [B, H, K, V].

    rule: called as rule(q, k, v, g=, beta=, initial_state=, output_final_state=True, **options).
    """

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = x
        out, final = rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options)
        return out, final

    def decay(x: Tensors) -> Tensor:
        q, k, v, g, beta = x
        dtype, keys = wide(k.dtype), k.shape[-1]
        identity = torch.eye(keys, dtype=dtype, device=k.device).expand(*decay_shape(x)).contiguous()
        _, final = run((q, k, v.new_zeros(*v.shape[:-1], keys), g, beta), identity)
        return final

    def decay_shape(x: Tensors) -> Shape:
        _, k, v, *_ = x
        return v.shape[0], v.shape[2], k.shape[-1], k.shape[-1]

    def state_shape(x: Tensors) -> Shape:
        return (*decay_shape(x)[:3], x[2].shape[-1])

    return Recurrence("delta rule", MATRIX, run, decay, state_shape, decay_shape, like=2)


def gated(rule: Callable[..., Any], **options: Any) -> Recurrence:
    """Return the recurrence of linear attention with gates g in log space: of a head, or of its K rows.

    Its tensors are q, k [B, S, H, K], v [B, S, H, V], g [B, S, H] or [B, S, H, K]. The state is [B, H, K, V].

    rule: called as rule(q, k, v, g, initial_state=, output_final_state=True, **options), as fla's.
    """

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, final = rule(*x, initial_state=state, output_final_state=True, **options)
        return out, final

    def decay(x: Tensors) -> Tensor:
        return x[3].to(wide(x[3].dtype)).sum(1).exp().reshape(decay_shape(x))

    def decay_shape(x: Tensors) -> Shape:
        g = x[3]
        return g.shape[0], g.shape[2], g.shape[3] if g.dim() == 4 else 1, 1

    def state_shape(x: Tensors) -> Shape:
        _, k, v, _ = x
        return v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]

    return Recurrence("gated linear attention", ELEMENTWISE, run, decay, state_shape, decay_shape, like=2)


def mamba2(
    scan: Callable[..., Any],
    A: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Recurrence:
    """Return the recurrence of Mamba 2, by the signature of mamba-ssm's mamba_chunk_scan_combined.

    Its tensors are x [B, S, H, P], dt [B, S, H], B and C [B, S, G, N]. The state is [B, H, P, N]. A decay is
    a number a head: exp of A times the sum of dt.

    scan: called as scan(x, dt, A, B, C, initial_states=, return_final_states=True, ...).
    """
    steps: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, dt, B, C = x
        ends = {"initial_states": state, "return_final_states": True}
        out, final = scan(hidden, dt, A, B, C, **steps, **options, **ends)
        return out, final

    def decay(x: Tensors) -> Tensor:
        dt = x[1] if dt_bias is None else x[1] + dt_bias.to(x[1].dtype)
        dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        total = dt.to(wide(dt.dtype)).sum(1)
        return (total * A.to(total.dtype)).exp()[..., None, None]

    def state_shape(x: Tensors) -> Shape:
        hidden, _, B, _ = x
        return hidden.shape[0], hidden.shape[2], hidden.shape[3], B.shape[-1]

    def decay_shape(x: Tensors) -> Shape:
        return (*state_shape(x)[:2], 1, 1)

    return Recurrence("Mamba 2", ELEMENTWISE, run, decay, state_shape, decay_shape, like=0)
