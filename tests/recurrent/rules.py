"""The recurrences that tests run: plain kernels behind the adapters, with tensors and parameters."""

from __future__ import annotations

import torch
from plain import delta_rule as plain_delta_rule
from plain import gated_linear_attention, selective_scan
from torch.nn.functional import normalize, softplus

from burst_mcore.recurrent.kernels import delta_rule, elementwise, gated, linear_attention, mamba1, mamba2

N, H, K, V = 48, 2, 3, 5


def tensors(name, n=N, dtype=torch.float64, seed=0, heads=H, groups=1):
    """(tensors of a recurrence, a gradient of its outputs); Mamba 1 has V channels, or as many as `heads`."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, n, heads, K), normalize(torch.randn(2, n, heads, K), dim=-1)
    v, gate = torch.randn(2, n, heads, V), -torch.rand(2, n, heads)
    rows = -torch.rand(2, n, heads, K)
    beta = torch.rand(2, n, heads)
    channels = V if heads == H else heads
    drawn = {
        "delta rule": (q, k, v, gate, beta),
        "Kimi's delta rule": (q, k, v, rows, beta),
        "a gate of a head": (q, k, v, gate),
        "a gate of each row": (q, k, v, rows),
        "Mamba 2": (v, torch.randn(2, n, heads), *(torch.randn(2, n, groups, K) for _ in "BC")),
        "linear attention in chunks": (q, k, v, gate),
        "a linear unit": (v.flatten(2), torch.rand(2, n, heads * V)),
        "Mamba 1": tuple(torch.randn(2, rows, n) for rows in (channels, channels, K, K)),
    }[name]
    cast = tuple(x.to(dtype) for x in drawn)
    return cast, torch.randn_like(cast[RULES[name].like])


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
    "a gate of a head": gated(gated_linear_attention),
    "a gate of each row": gated(gated_linear_attention),
    "Mamba 2": in_mamba2(chunk_scan, A, D, BIAS),
    "linear attention in chunks": gated(linear_attention, chunk=5),
    "a linear unit": elementwise(),
    "Mamba 1": in_mamba1(*of_channels(V)),
}


def learned(name, heads=H, groups=1, dtype=torch.float64, n=N, parameters=None):
    """(a recurrence, its tensors, its parameters, or those given) of which all need gradients."""
    x = [each.requires_grad_() for each in tensors(name, n, dtype, heads=heads, groups=groups)[0]]
    torch.manual_seed(1)
    given = {
        "Mamba 2": (-torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads)),
        "Mamba 1": of_channels(heads),
    }.get(name, ())
    made = [each.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for each in given]
    own = made if parameters is None else parameters
    make = {"Mamba 2": lambda *own: in_mamba2(chunk_scan, *own), "Mamba 1": in_mamba1}.get(name)
    return make(*own) if make else RULES[name], x, own
