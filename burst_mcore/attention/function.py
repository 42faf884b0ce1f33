"""burst_attention: the public function, its checks, and the autograd node around the two passes."""

from __future__ import annotations

import logging
import math
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_mcore.attention.actions import hops
from burst_mcore.attention.agreement import Agreement, Signature, agreement
from burst_mcore.attention.choice import (
    Candidate,
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
from burst_mcore.attention.passes import Call, Keys, Queries, backward, forward, row_delta
from burst_mcore.attention.plan import pooled_rows
from burst_mcore.attention.ring import ProcessGroups
from burst_mcore.attention.schedule import PASSES, Route, program
from burst_mcore.attention.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.rates import DEFAULT

logger = logging.getLogger("burst_mcore")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    topology: Topology,
    mask: Mask,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: BurstConfig | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is sharded over the ranks of `topology` (BurstAttention).

    Every rank of the ring calls it with its own shard. Equals, for the whole sequence,
    softmax(softmax_scale q k^T + mask) v, each group of heads / kv_heads query heads sharing a K/V head.

    Args:
        q: [batch, local sequence, heads, head_dim]; float32, bfloat16, float16 (float64 for tests).
        k: [batch, local sequence, kv_heads, head_dim]; kv_heads divides heads and is never repeated on the
            wire. Same dtype and device as q.
        v: [batch, local sequence, kv_heads, value_dim].
        topology: the ring. It has no default: attention over one rank is `Topology.single()`.
        mask: over global positions; which positions a rank holds is up to `config.layout`.
        softmax_scale: default 1 / sqrt(head_dim).
        softcap, sinks: not supported yet; must be None.
        config: default `BurstConfig()`.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        out [batch, local sequence, heads, value_dim] in the dtype of q, and with `return_lse` also lse
        [batch, local sequence, heads] in float32 (float64 for float64 inputs), -inf where a query sees no
        key. A gradient through lse needs a kernel that takes D ("reference"); with others backward raises.

    Raises:
        ValueError: before any communication if this rank's arguments are not legal; after an exchange of a
            few bytes if another rank's are not, or differ from this rank's.
        RuntimeError: a rank of the ring has gone.
    """
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology must be a Topology, got {topology!r}: Topology.from_group(group) or Topology.single()"
        )
    peers = agreement(topology)
    config = BurstConfig() if config is None else config
    try:
        call = _checked_call(q, k, v, topology, mask, softmax_scale, softcap, sinks, config, return_lse)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        signature = _signature(call, topology, config, q, k, v, wanted)
    except Exception as error:
        if peers is not None:
            peers.refuse(error)
        raise
    number = peers.agree({"pass": "forward", **signature}) if peers is not None else 0
    inputs = map(_rows_dense, (q, k, v))
    out, lse = _BurstAttention.apply(call, peers, {**signature, "of call": str(number)}, *inputs)  # type: ignore[no-untyped-call]
    return (out, lse.transpose(1, 2)) if return_lse else out


def connect(topology: Topology, config: BurstConfig) -> None:
    """Make the communicators that calls with `config` will use, now instead of in the first of them.

    Collective over the ring; on gloo there is nothing to make. A degree of head parallelism that is "auto" is
    known only in a call.
    """
    if topology.size == 1:
        return
    degree = config.head_parallel if isinstance(config.head_parallel, int) else 1
    ranks = Ranks(topology.size, topology.intra_size)
    route = route_for(degree, ranks, ring=config.ring, overlap=config.overlap)
    transport = ProcessGroups(topology, route)
    for name in PASSES:
        for channel, _ in hops(program(topology.rank, route, name)):
            if channel is not None:
                transport.carrier(channel)


class _BurstAttention(torch.autograd.Function):
    """Saves q, k, v and lse as they are on the ring, and out; one params object crosses."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        peers: Agreement | None,
        signature: Signature,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(q.device.type, enabled=False):
            done = forward(call, q, k, v)
        ctx.call, ctx.peers, ctx.signature = call, peers, signature
        ctx.save_for_backward(done.q, done.k, done.v, done.out, done.ring_lse)
        ctx.set_materialize_grads(False)
        return done.out, done.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        if dlse is not None and not call.kernel.takes_delta:
            error = ValueError(
                f"a gradient came through lse, which kernel {call.kernel.name!r} cannot take: use "
                f"kernel='reference', or lse.detach()"
            )
            if ctx.peers is not None:
                ctx.peers.refuse(error)
            raise error
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        if ctx.peers is not None:
            ctx.peers.agree({"pass": "backward", **ctx.signature})
        with torch.autocast(q.device.type, enabled=False):
            delta = row_delta(dout, out)
            if dlse is not None:  # d lse / d scores = P, which enters dS as -D does
                delta -= dlse
            dq, dk, dv = backward(call, Queries(q, dout, delta, lse), Keys(k, v), out)
        return None, None, None, dq, dk, dv


def _checked_call(
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
    route, direction = _way(config, topology, shard, mask, q.device.type)
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


def _way(config: BurstConfig, topology: Topology, shard: Shard, mask: Mask, device: str) -> tuple[Route, str]:
    """The route, and what travels in backward; what is "auto" by the cost model."""
    ranks, layout = Ranks(topology.size, topology.intra_size), Layout.of(config.layout)
    legal = legal_degrees(ranks, shard.heads, shard.kv_heads)
    degree = config.head_parallel
    if isinstance(degree, int):
        why_not = why_not_degree(degree, ranks, shard.heads, shard.kv_heads)
        if why_not is not None:
            raise ValueError(
                f"head_parallel={degree} is not legal with {shard.heads} heads, {shard.kv_heads} K/V heads "
                f"and {topology.size} ranks, {topology.intra_size} a node: {why_not}; legal: {legal}"
            )
        pooled_rows(layout, shard.tokens * topology.size, 0, topology.size // degree, degree, 0)
        legal = [degree]
    directions = ("query", "kv") if config.backward == "auto" else (config.backward,)
    if len(legal) == len(directions) == 1 or topology.size == 1:
        degree = legal[0]
        return (
            route_for(degree, ranks, ring=config.ring, overlap=config.overlap),
            directions[0],
        )
    found = candidates(
        shard,
        layout,
        mask,
        ranks,
        topology.rates or DEFAULT.get(device, DEFAULT["cpu"]),
        ring=config.ring,
        overlap=config.overlap,
        degrees=tuple(legal),
        directions=directions,
    )
    chosen = best(found)
    _say(chosen, found)
    return chosen.route, chosen.direction


@lru_cache(maxsize=256)
def _say(chosen: Candidate, found: tuple[Candidate, ...]) -> None:
    """Log a choice, once."""
    logger.info("%s, backward %s: %s", chosen.route, chosen.direction, reason(chosen, found))


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


def _signature(
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


def _rows_dense(x: Tensor) -> Tensor:
    """x with unit stride along head_dim, as kernels need; any other strides are fine."""
    return x if x.stride(-1) == 1 else x.contiguous()
