"""Requests: one rank's legal arguments, which resolve to a `Call` once the lengths of all ranks are known.

A rank cannot tell the length of the global sequence from its own share. So `validate` makes the request
before the ranks have met, and `resolve` the call after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from burst_mcore.agreement import Signature
from burst_mcore.attention.autotune.decide import choose_route, degrees_of, latent_gains
from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.call import Call
from burst_mcore.attention.checks import (
    check_group,
    check_latent,
    check_lengths,
    check_settings,
    check_sinks,
    check_tensors,
)
from burst_mcore.attention.geometry.launches import Launches, launches_of
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.kernels.kernel import Problem, Scores
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.shard import Shard
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.machines import default_rates
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates
from burst_mcore.registry import ensure, lookup
from burst_mcore.words import brief

REQUESTS = 256
"""Requests that are remembered: of so many masks, configurations and shapes, those used last."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank's call before the global sequence's length is known, without tensors and process groups."""

    rank: int
    ranks: Ranks
    rates: Rates
    mask: Mask
    config: BurstConfig
    device: str
    shard: Shard
    """`tokens` counts this rank's own: fewer than others', if the sequence does not divide."""
    scores: Scores
    return_lse: bool
    sinks: bool
    travels: str = "off"
    """Whether the latent travels, if K and V are made of one: `Latent.travels`."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config.layout)

    @cached_property
    def signature(self) -> Signature:
        """The properties that the ranks of a ring must have in common, at any length of the sequence."""
        shard = self.shard
        return {
            "q": f"[{shard.batch}, ., {shard.heads}, {shard.head_dim}]",
            "k": f"[{shard.batch}, ., {shard.kv_heads}, {shard.head_dim}]",
            "latent": f"{shard.latent}, travels: {self.travels}",
            "v": f"[{shard.batch}, ., {shard.kv_heads}, {shard.value_dim}]",
            "dtype": str(shard.dtype),
            "device": self.device,
            "mask": str(self.mask),
            "softmax_scale": repr(self.scores.scale),
            "softcap": repr(self.scores.softcap),
            "topology": f"{self.ranks.size // self.ranks.intra} x {self.ranks.intra}",
            "rates": str(self.rates),
            **{field.name: str(getattr(self.config, field.name)) for field in fields(self.config)},
            "lse wanted": str(self.return_lse),
            "sinks": str(self.sinks),
        }


def validate(
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
    up: Tensor | None = None,
    travels: str = "off",
) -> Request:
    """Return the request that these arguments make; ValueError if they are not legal on any other ranks.

    Args:
        up: the weights of a latent, if k and v are it and its rope key: see `Latent`.
        travels: `Latent.travels`.
    """
    if up is None:
        check_tensors(q, k, v, may_be_empty=topology.size > 1)
        shard = shard_of(q.shape, k.shape[2], v.shape[3], q.dtype, config)
    else:
        check_latent(q, k, v, up, travels, may_be_empty=topology.size > 1)
        value_dim = up.shape[2] - (q.shape[3] - v.shape[3])
        shard = shard_of(q.shape, q.shape[2], value_dim, q.dtype, config, (k.shape[3], v.shape[3]))
    check_sinks(sinks, q)
    return request_of(
        shard,
        q.device.type,
        topology,
        mask,
        softmax_scale,
        softcap,
        sinks is not None,
        config,
        return_lse,
        travels,
    )


def shard_of(
    q_shape: Sequence[int],
    kv_heads: int,
    value_dim: int,
    dtype: torch.dtype,
    config: BurstConfig,
    latent: tuple[int, int] | None = None,
) -> Shard:
    """Return the shapes of a rank's tensors; q_shape: [batch, tokens, heads, head_dim]."""
    if not isinstance(config, BurstConfig):
        raise ValueError(f"config must be a BurstConfig, got {brief(config)}")
    batch, tokens, heads, head_dim = q_shape
    return Shard(
        batch=batch,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        grad_dtype=dtype if dtype == torch.float64 else config.grad_dtype,
        latent=latent,
    )


def request_of(
    shard: Shard,
    device: str,
    topology: Topology,
    mask: Mask,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: bool,
    config: BurstConfig,
    return_lse: bool,
    travels: str = "off",
) -> Request:
    """Return the request of legal tensors of these shapes; see `validate`."""
    softcap = None if softcap == 0 else softcap  # none, as flash-attn has it
    check_settings(mask, softmax_scale, softcap)
    handles = ensure(topology), ensure(mask), ensure(config)
    request = _request(shard, device, *handles, softmax_scale, softcap, sinks, return_lse, travels)
    if topology.size > 1:
        check_group(topology, device)
    return request


@lru_cache(maxsize=REQUESTS)
def _request(
    shard: Shard,
    device: str,
    topology: str,
    mask: str,
    config: str,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: bool,
    return_lse: bool,
    travels: str,
) -> Request:
    """Return the request, cached for equal arguments: handles compare faster than their values."""
    place: Topology = lookup(topology)
    options: BurstConfig = lookup(config)
    ranks = Ranks(place.size, place.intra_size)
    Layout.of(options.layout).divisor(ranks.size)  # raises if it does not go with so many ranks
    degrees_of(options, ranks, shard)
    scale = shard.head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    softcap = None if softcap is None else float(softcap)
    margin = options.sm_margin if ranks.size > 1 else 0
    return Request(
        rank=place.rank,
        ranks=ranks,
        rates=place.rates or default_rates(device),
        mask=lookup(mask),
        config=options,
        device=device,
        shard=shard,
        scores=Scores(scale, softcap, options.deterministic, margin),
        return_lse=return_lse,
        sinks=sinks,
        travels=travels,
    )


def resolve(request: Request, lengths: Sequence[int]) -> Call:
    """Return the call where rank r holds lengths[r] tokens; ValueError, on all ranks, if it is not legal."""
    n, size = sum(lengths), request.ranks.size
    check_lengths(request.layout, tuple(lengths))
    request.mask.check(n)
    mask = request.mask.clipped(n)
    shard = replace(request.shard, tokens=request.layout.padded(n, size) // size)
    if shard.latent is not None and request.travels != "off":
        travelling = replace(shard, latent_travels=True)
        options = request.config, request.ranks, request.rates, travelling, mask, n
        shard = travelling if request.travels == "on" or latent_gains(*options) else shard
    route, direction = choose_route(request.config, request.ranks, request.rates, shard, mask, n)
    problem = problem_of(
        shard.pooled(route.heads),
        request.device,
        launches_of(mask, n),
        documents=mask.document_ends is not None,
        softcap=request.scores.softcap is not None,
        deterministic=request.scores.deterministic,
    )
    return Call(
        rank=request.rank,
        route=route,
        plan=plan_of(request.layout, mask, n, route.placement),
        scores=request.scores,
        problem=problem,
        kernel=choose(request.config.kernel, problem),
        direction=direction,
        grad_dtype=shard.grad_dtype,
        kv_heads=shard.carried[0],
        latent_travels=shard.latent_travels,
        lse_at_home=request.return_lse or request.sinks,
    )


def problem_of(
    shard: Shard,
    device: str,
    launches: Launches,
    *,
    softcap: bool,
    deterministic: bool,
    documents: bool = False,
) -> Problem:
    """Return the problem that a kernel must serve; shard: as it is on the ring."""
    return Problem(
        device=device,
        dtype=shard.dtype,
        heads=shard.heads,
        kv_heads=shard.kv_heads,
        head_dim=shard.head_dim,
        value_dim=shard.value_dim,
        softcap=softcap,
        deterministic=deterministic,
        launches=launches,
        documents=documents,
    )
