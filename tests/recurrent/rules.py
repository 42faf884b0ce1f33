"""The recurrences that tests run: plain kernels behind the adapters, with tensors and parameters."""

from __future__ import annotations

from functools import wraps

import torch
from plain import delta_rule as plain_delta_rule
from plain import gated_linear_attention, selective_scan
from torch.nn.functional import normalize, softplus

from burst_mcore.recurrent.kernels import delta_rule, elementwise, gated, linear_attention, mamba1, mamba2

N, H, K, V = 48, 2, 3, 5
EXACT = {torch.float64: 1e-11, torch.float32: 2e-6}
"""By dtype, the largest error beside one process."""


def tensors(name, n=N, dtype=torch.float64, seed=0, heads=H, groups=1, gates=None):
    """(tensors of a recurrence, a gradient of its outputs); Mamba 1 has V channels, or as many as `heads`.

    gates: the dtype of gates and steps, if they have one of their own.
    """
    torch.manual_seed(seed)
    q, k = torch.randn(2, n, heads, K), normalize(torch.randn(2, n, heads, K), dim=-1)
    v, gate = torch.randn(2, n, heads, V), -torch.rand(2, n, heads)
    rows = -torch.rand(2, n, heads, K)
    beta = torch.rand(2, n, heads)
    channels = V if heads == H else heads
    drawn = {
        "delta rule": (q, k, v, gate, beta),
        "Kimi's delta rule": (q, k, v, rows, beta),
        "a delta rule whose heads share keys": (q[:, :, :groups], k[:, :, :groups], v, gate, beta),
        "a gate of a head": (q, k, v, gate),
        "a gate of each row": (q, k, v, rows),
        "Mamba 2": (v, torch.randn(2, n, heads), *(torch.randn(2, n, groups, K) for _ in "BC")),
        "linear attention in chunks": (q, k, v, gate),
        "a linear unit": (v.flatten(2), torch.rand(2, n, heads * V)),
        "Mamba 1": tuple(torch.randn(2, rows, n) for rows in (channels, channels, K, K)),
    }[name]
    at = 1 if name in ("Mamba 1", "Mamba 2", "a linear unit") else 3
    cast = tuple(x.to(gates or dtype if place == at else dtype) for place, x in enumerate(drawn))
    return cast, torch.randn_like(cast[RULES[name].like])


@wraps(plain_delta_rule)
def of_shared_keys(q, k, v, **named):
    """With fewer heads of queries and keys than of values, as fla's kernels take them."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return plain_delta_rule(q, k, v, **named)


def on_gpus(kernel, like=2):
    """A kernel that computes in float32 whatever comes, as those of GPUs do; outputs as argument `like`."""

    @wraps(kernel)
    def run(*x, **options):
        named = {key: y.float() if isinstance(y, torch.Tensor) else y for key, y in options.items()}
        out, final = kernel(*(y.float() for y in x), **named)
        return out.to(x[like].dtype), final

    return run


def chunk_scan(x, dt, A, B, C, *, D, dt_bias, dt_softplus, dt_limit, initial_states, return_final_states):
    """A stand-in of mamba-ssm's mamba_chunk_scan_combined, by its signature, from our reference."""
    assert dt_softplus and return_final_states
    dt = softplus(dt + dt_bias.to(dt)).clamp(*dt_limit)
    k, q = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    out, final = gated_linear_attention(q, k, x * dt[..., None], dt * A.to(dt), initial_state=state)
    return out + D.to(x)[:, None] * x, final.transpose(-1, -2)


def in_mamba2(scan, A, D, bias):
    return mamba2(scan, A, D=D, dt_bias=bias, dt_softplus=True, dt_limit=(0.01, 2.0))


def in_mamba1(A, D, bias):
    return mamba1(selective_scan, A, D=D, delta_bias=bias, delta_softplus=True)


def of_channels(many):
    """A, D and the bias of Mamba 1."""
    return -torch.arange(1.0, K + 1).repeat(many, 1), torch.arange(many) - 1.0, torch.arange(many) / many


A, D, BIAS = -torch.rand(H) - 0.1, torch.randn(H), torch.randn(H)

RULES = {
    "delta rule": delta_rule(plain_delta_rule),
    "Kimi's delta rule": delta_rule(plain_delta_rule),
    "a delta rule whose heads share keys": delta_rule(of_shared_keys),
    "a gate of a head": gated(gated_linear_attention),
    "a gate of each row": gated(gated_linear_attention),
    "Mamba 2": in_mamba2(chunk_scan, A, D, BIAS),
    "linear attention in chunks": gated(linear_attention, chunk=5),
    "a linear unit": elementwise(),
    "Mamba 1": in_mamba1(*of_channels(V)),
}
ON_GPUS = RULES | {
    "delta rule": delta_rule(on_gpus(plain_delta_rule)),
    "Kimi's delta rule": delta_rule(on_gpus(plain_delta_rule)),
    "a delta rule whose heads share keys": delta_rule(on_gpus(of_shared_keys)),
    "a gate of a head": gated(on_gpus(gated_linear_attention)),
    "a gate of each row": gated(on_gpus(gated_linear_attention)),
    "Mamba 2": in_mamba2(on_gpus(chunk_scan, 0), A, D, BIAS),
}
"""The same, each with a kernel that computes in float32."""


def learned(name, heads=H, groups=1, dtype=torch.float64, n=N, parameters=None, gates=None, rules=RULES):
    """(a recurrence, its tensors, its parameters, or those given) of which all need gradients."""
    drawn, _ = tensors(name, n, dtype, heads=heads, groups=groups, gates=gates)
    x = [each.requires_grad_() for each in drawn]
    torch.manual_seed(1)
    given = {
        "Mamba 2": (-torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads)),
        "Mamba 1": of_channels(heads),
    }.get(name, ())
    made = [each.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for each in given]
    own = made if parameters is None else parameters
    scan = chunk_scan if rules is RULES else on_gpus(chunk_scan, 0)
    make = {"Mamba 2": lambda *own: in_mamba2(scan, *own), "Mamba 1": in_mamba1}.get(name)
    return make(*own) if make else rules[name], x, own
