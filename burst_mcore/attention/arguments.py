"""What the arguments of a call ask for: a `Call`, or a ValueError that says what is wrong."""

from __future__ import annotations

import logging
import math
from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from burst_mcore.attention.agreement import Signature
from burst_mcore.attention.choice import (
    Ranks,
    best,
    candidates,
    legal_degrees,
    reason,
    route_for,
    why_not_degree,
)
from burst_mcore.attention.cost import Shard
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.mask import Mask
from burst_mcore.attention.passes import Call
from burst_mcore.attention.plan import pooled_rows
from burst_mcore.attention.ring import ProcessGroups
from burst_mcore.attention.schedule import Route
from burst_mcore.attention.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.rates import DEFAULT, Rates

logger = logging.getLogger("burst_mcore")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    topology: Topology,
    mask: Mask,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    config: BurstConfig,
    return_lse: bool,
) -> Call:
    """The call that these arguments ask for; ValueError if there is none."""
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {mask!r}: Mask.causal() or Mask.full()")
    if not isinstance(config, BurstConfig):
        raise ValueError(f"config must be a BurstConfig, got {config!r}")
    for name, value in (("softcap", softcap), ("sinks", sinks)):
        if value is not None:
            raise ValueError(f"{name} is not supported yet, it must be None, got {value!r}")
    _check_tensors(q, k, v)
    batch, tokens, heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale!r}")
    n, layout = tokens * topology.size, Layout.of(config.layout)
    layout.runs(n, topology.rank, topology.size)  # raises if the layout cannot deal n tokens
    kv_heads, value_dim = v.shape[2:]
    grad_dtype = (
        torch.promote_types(config.grad_dtype, q.dtype) if q.dtype.itemsize == 8 else config.grad_dtype
    )
    shard = Shard(batch, tokens, heads, kv_heads, head_dim, value_dim, q.dtype.itemsize, grad_dtype.itemsize)
    ranks = Ranks(topology.size, topology.intra_size)
    rates = topology.rates or DEFAULT.get(q.device.type, DEFAULT["cpu"])
    route, direction = _way(config, ranks, rates, shard, mask)
    if topology.size > 1:
        _check_group(topology, q.device.type)
    on_ring = shard.pooled(route.heads)
    kernel = choose(
        config.kernel,
        Problem(q.device.type, q.dtype, on_ring.heads, on_ring.kv_heads, head_dim, value_dim),
    )
    return Call(
        rank=topology.rank,
        route=route,
        layout=layout,
        mask=mask,
        n=n,
        scale=scale,
        kernel=kernel,
        direction=direction,
        grad_dtype=grad_dtype,
        transport=ProcessGroups(topology, route),
        kv_heads=kv_heads,
        return_lse=return_lse,
    )


@lru_cache(maxsize=1024)
def _way(config: BurstConfig, ranks: Ranks, rates: Rates, shard: Shard, mask: Mask) -> tuple[Route, str]:
    """The route, and what travels in backward; what is "auto" by the cost model, said once."""
    degrees = _degrees(config, ranks, shard)
    directions = ("query", "kv") if config.backward == "auto" else (config.backward,)
    rings = ("double", "flat") if config.ring == "auto" else (config.ring,)
    if len(degrees) == len(directions) == len(rings) == 1 or ranks.size == 1:
        return route_for(degrees[0], ranks, ring=rings[0], overlap=config.overlap), directions[0]
    found = candidates(
        shard,
        Layout.of(config.layout),
        mask,
        ranks,
        rates,
        overlap=config.overlap,
        rings=rings,
        degrees=degrees,
        directions=directions,
    )
    chosen = best(found)
    logger.info("%s, backward %s: %s", chosen.route, chosen.direction, reason(chosen, found))
    return chosen.route, chosen.direction


def _degrees(config: BurstConfig, ranks: Ranks, shard: Shard) -> tuple[int, ...]:
    """The degrees of head parallelism to choose from; ValueError if the one asked for is not legal."""
    degree = config.head_parallel
    if not isinstance(degree, int):
        return tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    why_not = why_not_degree(degree, ranks, shard.heads, shard.kv_heads)
    if why_not is not None:
        raise ValueError(
            f"head_parallel={degree} is not legal with {shard.heads} heads, {shard.kv_heads} K/V heads and "
            f"{ranks.size} ranks, {ranks.intra} a node: {why_not}; legal: "
            f"{legal_degrees(ranks, shard.heads, shard.kv_heads)}"
        )
    n = shard.tokens * ranks.size
    pooled_rows(Layout.of(config.layout), n, 0, ranks.size // degree, degree, 0)  # raises if it cannot pool
    return (degree,)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or 0 in x.shape:
            what = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
            raise ValueError(
                f"{name} must be a tensor [batch, local sequence, heads, head_dim] without empty dimensions, "
                f"got {what}"
            )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(f"q, k, v must have the same batch and local sequence, got {shapes}")
    if k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k and v must have the same number of heads, and it must divide that of q, got {shapes}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head_dim, got {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"q, k, v must have one dtype, of {', '.join(map(str, DTYPES))}; "
            f"got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")


def _check_group(topology: Topology, device: str) -> None:
    if topology.communicators is None:
        raise ValueError(
            f"a ring of {topology.size} ranks needs its process group: Topology.from_group(group)"
        )
    carries = {"cpu": "gloo", "cuda": "nccl"}.get(device)
    backends = topology.communicators.backends
    if carries is None or f"{device}:{carries}" not in backends:
        raise ValueError(f"{device} tensors need a process group with {device}:{carries}, got {backends}")


def signature(
    call: Call, topology: Topology, config: BurstConfig, q: Tensor, k: Tensor, v: Tensor, wanted: bool
) -> Signature:
    """All that the ranks of a ring must have in common."""
    return {
        "q": str(tuple(q.shape)),
        "k": str(tuple(k.shape)),
        "v": str(tuple(v.shape)),
        "dtype": str(q.dtype),
        "device": q.device.type,
        "mask": str(call.mask),
        "softmax_scale": repr(call.scale),
        "topology": str(topology),
        "rates": str(topology.rates),
        **{field.name: str(getattr(config, field.name)) for field in fields(config)},
        "route": str(call.route),
        "travels in backward": call.direction,
        "kernel used": call.kernel.name,
        "lse wanted": str(call.return_lse),
        "gradient wanted": str(wanted),
    }
