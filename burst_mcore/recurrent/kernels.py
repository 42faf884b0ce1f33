"""The interface of a recurrence's kernel, and adapters to kernels by their signatures.

Over some tokens the last state is A S + B of the initial state S. A kernel with an initial and a last state
is enough: B is the last state from S = 0. For delta rules A is the last state from S = I with values of zero;
elsewhere A is a product of decays. Adapters take the kernel, so there is one adapter for a signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from burst_mcore.dtypes import wide
from burst_mcore.recurrent.maps import ELEMENTWISE, MATRIX, Algebra

Tensors = tuple[Tensor, ...]
"""Tensors of consecutive tokens, one row a token along `Recurrence.dim`."""
Shape = tuple[int, ...]
Kernel = Callable[..., Any]
KernelOfStates = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence: a kernel with states, and the decay A of its affine map."""

    name: str
    algebra: Algebra
    run: Callable[[Tensors, Tensor | None], tuple[Tensor, Tensor]]
    """(tensors, the initial state; None is zero) -> (outputs, the last state). Differentiable, and called
    with autocast off."""
    decay: Callable[[Tensors], Tensor]
    """A of these tokens, without a gradient."""
    state_shape: Callable[[Tensors], Shape]
    decay_shape: Callable[[Tensors], Shape]
    like: int
    """The index of the tensor with the shape of the outputs."""
    dim: int = 1
    parameters: Tensors = ()
    """Further tensors of the kernel that may need gradients, the same on all ranks."""


LAST, LASTS = ("initial_state", "output_final_state"), ("initial_states", "return_final_states")
"""The keywords for states of kernels of fla, and of mamba-ssm."""


@lru_cache(maxsize=256)
def signature_of(kernel: Kernel) -> tuple[str, Sequence[str]]:
    """Return the name of a kernel, and the names of its arguments.

    transformers wraps kernels, drops keywords that a kernel does not take, and shows the signature of its own
    torch code. So the signature of the kernel within the wrapper counts.
    """
    closure = inspect.getclosurevars(kernel).nonlocals if inspect.isfunction(kernel) else {}
    inner = closure.get("implementation", kernel)
    return getattr(inner, "__name__", str(inner)), [*inspect.signature(inner).parameters]


def check_states(kernel: Kernel, names: tuple[str, str]) -> None:
    """Check that a kernel's signature has the keywords for states. Raises ValueError."""
    name, parameters = signature_of(kernel)
    if absent := [name for name in names if name not in parameters]:
        words = f"kernel {name} takes no {' or '.join(absent)}: states could not pass between ranks"
        raise ValueError(f"{words}. Give one whose signature names {' and '.join(names)}")


def _tensors(options: dict[str, Any]) -> Tensors:
    return tuple(x for x in options.values() if isinstance(x, Tensor))


def delta_rule(rule: KernelOfStates, **options: Any) -> Recurrence:
    """Return the recurrence of a (gated, or Kimi's) delta rule, by the signature of fla's chunk kernels.

    S_t = (I - beta_t k_t k_t^T) exp(g_t) S_(t-1) + beta_t k_t v_t^T, so A is a product of matrices
    (transformers, Qwen3-Next, torch_recurrent_gated_delta_rule).
    Its tensors are q, k [B, S, Hk, K], v [B, S, H, V], g and beta. The state is [B, H, K, V].

    rule: called as rule(q, k, v, g=, beta=, initial_state=, output_final_state=True, **options).
    """
    check_states(rule, LAST)

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        *qkv, g, beta = x
        return rule(*qkv, g=g, beta=beta, initial_state=state, output_final_state=True, **options)

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

    return Recurrence("delta rule", MATRIX, run, decay, state_shape, decay_shape, 2, 1, _tensors(options))


def gated(rule: KernelOfStates, **options: Any) -> Recurrence:
    """Return the recurrence of linear attention with gates g in log space: of a head, or of its K rows.

    S_t = exp(g_t) S_(t-1) + k_t v_t^T, so A = exp(sum_t g_t).
    Its tensors are q, k [B, S, H, K], v [B, S, H, V], g [B, S, H] or [B, S, H, K]. The state is [B, H, K, V].

    rule: called as rule(q, k, v, g, initial_state=, output_final_state=True, **options), as fla's.
    """
    check_states(rule, LAST)

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return rule(*x, initial_state=state, output_final_state=True, **options)

    def decay(x: Tensors) -> Tensor:
        return x[3].to(wide(x[3].dtype)).sum(1).exp().reshape(decay_shape(x))

    def decay_shape(x: Tensors) -> Shape:
        g = x[3]
        return g.shape[0], g.shape[2], g.shape[3] if g.dim() == 4 else 1, 1

    def state_shape(x: Tensors) -> Shape:
        _, k, v, _ = x
        return v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]

    parameters = _tensors(options)
    return Recurrence("linear attention", ELEMENTWISE, run, decay, state_shape, decay_shape, 2, 1, parameters)


def linear_attention(
    *qkvg: Tensor, initial_state: Tensor | None = None, output_final_state: bool = True, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """fla's chunk_simple_gla in plain torch: S_t = exp(g_t) S_(t-1) + k_t v_t^T, out_t = q_t S_t.

    With G_t = sum_(s <= t) g_s: out_t = exp(G_t) q_t S_0 + sum_(s <= t) exp(G_t - G_s) (q_t k_s) v_s.
    """
    _, k, v, _ = qkvg
    dtype, outs, state = wide(v.dtype), [], initial_state
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype)
    for part in zip(*(x.to(dtype).transpose(1, 2).split(chunk, 2) for x in qkvg), strict=True):
        queries, keys, values, gates = part
        decay_logs = gates.cumsum(-1)[..., None]
        weights = queries @ keys.mT * (decay_logs - decay_logs.mT).tril().exp().tril()
        outs.append(weights @ values + queries * decay_logs.exp() @ state)
        last = decay_logs[..., -1:, :]
        state = state * last.exp() + (keys * (last - decay_logs).exp()).mT @ values
    return torch.cat(outs, 2).transpose(1, 2).to(v.dtype), state


def elementwise() -> Recurrence:
    """Return the recurrence of a linear unit (RG-LRU), h_t = a_t h_(t-1) + x_t, by a scan in plain torch.

    A = prod_t a_t. Its tensors are x and a [B, S, E]; the state is [B, E].
    """

    def run(tensors: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, a = tensors
        zero = x.new_zeros(shape(tensors), dtype=wide(x.dtype))
        h: Tensor = _LinearUnit.apply(x, a, zero if state is None else state)  # type: ignore[no-untyped-call]
        return h.to(x.dtype), h[:, -1]

    def decay(tensors: Tensors) -> Tensor:
        return tensors[1].to(wide(tensors[1].dtype)).prod(1)

    def shape(tensors: Tensors) -> Shape:
        return tensors[0].shape[0], tensors[0].shape[2]

    return Recurrence("linear unit", ELEMENTWISE, run, decay, shape, shape, like=0)


class _LinearUnit(torch.autograd.Function):
    """The scan h_t = a_t h_(t-1) + x_t with a reverse scan as backward, which saves only a, the state and h.

    With G_t = dL/dh_t in all: G_t = g_t + a_(t+1) G_(t+1), dx_t = G_t, da_t = G_t h_(t-1).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, state: Tensor) -> Tensor:
        h = _doubled(x, a, state)
        ctx.save_for_backward(a, state, h)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, state, h = ctx.saved_tensors
        later = pad(a[:, 1:], (0, 0, 0, 1)).flip(1)
        total = _doubled(gradient.flip(1), later, torch.zeros_like(state)).flip(1)
        before = torch.cat([state[:, None], h[:, :-1]], 1)
        return total, total * before, total[:, 0] * a[:, 0]


def _doubled(x: Tensor, a: Tensor, state: Tensor) -> Tensor:
    h, a = (y.to(wide(y.dtype)) for y in (x, a))
    reach = 1
    while reach < h.shape[1]:  # compose with the map that ends `reach` tokens earlier
        h = h + a * pad(h, (0, 0, reach, 0))[:, :-reach]
        a = a * pad(a, (0, 0, reach, 0), value=1.0)[:, :-reach]
        reach *= 2
    return h + a * state[:, None]


def mamba2(
    scan: KernelOfStates,
    A: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Recurrence:
    """Return the recurrence of Mamba 2, by the signature of mamba-ssm's mamba_chunk_scan_combined.

    Its tensors are x [B, S, H, P], dt [B, S, H], B and C [B, S, G, N]. The state is [B, H, P, N]:
    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T, so the decay is exp(A sum_t dt_t), a number a head.

    scan: called as scan(x, dt, A, B, C, initial_states=, return_final_states=True, ...).
    """
    check_states(scan, LASTS)
    options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, dt, B, C = x
        return scan(hidden, dt, A, B, C, initial_states=state, return_final_states=True, **options)

    def decay(x: Tensors) -> Tensor:
        total = _steps(x[1].to(wide(x[1].dtype)), dt_bias, dt_softplus).clamp(*dt_limit).sum(1)
        return (total * A.to(total.dtype)).exp()[..., None, None]

    def state_shape(x: Tensors) -> Shape:
        hidden, _, B, _ = x
        return hidden.shape[0], hidden.shape[2], hidden.shape[3], B.shape[-1]

    def decay_shape(x: Tensors) -> Shape:
        return (*state_shape(x)[:2], 1, 1)

    parameters = A, *_tensors(options)
    return Recurrence("Mamba 2", ELEMENTWISE, run, decay, state_shape, decay_shape, 0, 1, parameters)


def mamba1(
    scan: Kernel, A: Tensor, *, delta_bias: Tensor | None = None, delta_softplus: bool = False, **options: Any
) -> Recurrence:
    """Return the recurrence of Mamba 1, by the signature of mamba-ssm's selective_scan_fn.

    Its tensors are u, dt [B, E, S], B and C [B, N, S]. State and decays are [B, E, N]:
    S_t = exp(dt_t A) S_(t-1) + dt_t u_t B_t^T, so the decay is exp(A sum_t dt_t).
    The kernel has no initial state, and its last state has no gradient. So N additional tokens in front write
    the state, a column each, and N at the end read a column each: their outputs are the state, in float32.

    scan: called as scan(u, dt, A, B, C, **options), without a gate z.
    """
    bias, columns = None if delta_bias is None else delta_bias[:, None], A.shape[-1]

    def run(x: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        u, dt, B, C = (y.to(wide(y.dtype)) for y in x)
        eye = torch.eye(columns, dtype=B.dtype, device=B.device).expand(len(B), -1, -1)
        none = u.new_zeros(state_shape(x))
        parts = [(u, _steps(dt, bias, delta_softplus), B, C), (none, none, eye, eye)]
        if state is not None:
            later = torch.arange(columns - 1, -1, -1, device=A.device)  # later short steps, which decay it
            parts.insert(0, (state / _SHORT * (-A * _SHORT * later).exp(), none + _SHORT, eye, eye))
        u, dt, B, C = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        out = scan(u, dt, A, B, C, **options)[..., -x[0].shape[-1] - columns :]
        return out[..., :-columns].to(x[0].dtype), out[..., -columns:]

    def decay(x: Tensors) -> Tensor:
        total = _steps(x[1].to(wide(x[1].dtype)), bias, delta_softplus).sum(-1, keepdim=True)
        return (total * A.to(total.dtype)).exp()

    def state_shape(x: Tensors) -> Shape:
        return (*x[0].shape[:2], columns)

    parameters = A, *_tensors({"bias": bias, **options})
    return Recurrence("Mamba 1", ELEMENTWISE, run, decay, state_shape, state_shape, 0, 2, parameters)


_SHORT = 2.0**-20
"""The step of a token that writes a column of a state: too short to decay other columns."""


def _steps(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if positive else dt
