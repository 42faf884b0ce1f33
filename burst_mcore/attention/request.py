"""Requests: one rank's legal arguments, which resolve to a `Call` once all ranks' lengths are known.

A rank cannot infer the length of the global sequence from its shard. `resolve.call_of` first resolves a
request with equal shards; if the agreement shows other lengths, it resolves again with the true lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from burst_mcore.agreement.claims import Signature
from burst_mcore.attention.checks import check_group, check_latent, check_settings, check_sinks, check_tensors
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.kernels.kernel import Scores
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.heads import degrees_of
from burst_mcore.config import BurstConfig
from burst_mcore.latest import Latest
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates, default_rates


class Options(NamedTuple):
    """The arguments of a call besides its tensors."""

    topology: Topology
    mask: Mask
    config: BurstConfig
    softmax_scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    return_max_logit: bool = False
    rotates: str = "off"
    """`Latent.rotates`."""


class Tensors(NamedTuple):
    """The tensors of a call on this rank."""

    q: Tensor
    """[B, S, H, D]."""
    k: Tensor
    """[B, S, Hkv, D]; with `up` the latent, [B, S, 1, R]."""
    v: Tensor
    """[B, S, Hkv, Dv]; with `up` the rope key, [B, S, 1, Dr]."""
    sinks: Tensor | None = None
    """[H]."""
    up: Tensor | None = None
    """[H, R, Dk + Dv], the up-projection of a latent to K and V: see `Latent`."""

    @property
    def value_dim(self) -> int:
        """The width of a value, and of a result."""
        if self.up is None:
            return self.v.shape[3]
        return self.up.shape[2] - (self.q.shape[3] - self.v.shape[3])


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank's call, without the global sequence's length, tensors and process groups."""

    rank: int
    ranks: Ranks
    rates: Rates
    mask: Mask
    config: BurstConfig
    device: str
    shard: Shard
    """This rank's shard: fewer tokens than other ranks', if the sequence does not divide."""
    scores: Scores
    return_lse: bool
    sinks: bool
    rotates: str = "off"
    """`Latent.rotates`; without meaning if K and V are inputs."""

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
            "latent": f"{shard.latent}, rotates: {self.rotates}",
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
            "max logits wanted": str(self.scores.max_logit),
            "sinks": str(self.sinks),
        }


def validate(tensors: Tensors, options: Options) -> Request:
    """Return the request of these arguments; ValueError if they are illegal on any ring."""
    topology = options.topology
    backends = topology.communicators and topology.communicators.backends
    place = topology.rank, topology.size, topology.intra_size, topology.rates, backends
    kind = tuple([_kind_of(x) for x in tensors]), place, options[1:]
    try:
        request = None if forward_ad._current_level >= 0 else _LEGAL.get(kind)
    except TypeError:  # an argument that has no hash is not legal
        request = None
    if request is None:
        request = _checked(tensors, options)
        check_group(topology, request.device)
        _LEGAL[kind] = request
    return request


_LEGAL = Latest()
"""Requests by kind of arguments; without the topology, since a cache must not keep process groups alive."""


def _kind_of(x: object) -> tuple[object, ...]:
    """Return the properties of a tensor that the checks read, except tangents."""
    if not isinstance(x, Tensor) or x.is_nested:
        return (type(x), "nested")
    return type(x), x.shape, x.dtype, x.device, x.layout


def _checked(tensors: Tensors, options: Options) -> Request:
    q, k, v, sinks, up = tensors
    topology, mask, config, scale, softcap, _, _, rotates = options
    check_settings(mask, config, scale, softcap, rotates)
    may_be_empty = topology.size > 1
    if up is None:
        check_tensors(q, k, v, may_be_empty=may_be_empty)
        shard = shard_of(q.shape, k.shape[2], v.shape[3], q.dtype, config.grad_dtype)
    else:
        check_latent(q, k, v, up, may_be_empty=may_be_empty)
        latent = k.shape[3], v.shape[3]
        shard = shard_of(q.shape, q.shape[2], tensors.value_dim, q.dtype, config.grad_dtype, latent)
    check_sinks(sinks, q)
    return request_of(shard, q.device.type, options, sinks=sinks is not None)


def shard_of(
    q_shape: tuple[int, ...],
    kv_heads: int,
    value_dim: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    latent: tuple[int, int] | None = None,
) -> Shard:
    """Return the shapes of a rank's tensors; q_shape: [batch, tokens, heads, head_dim]."""
    sizes = dict(zip(("batch", "tokens", "heads", "head_dim"), q_shape, strict=True))
    grad_dtype = dtype if dtype == torch.float64 else grad_dtype
    widths = {"kv_heads": kv_heads, "value_dim": value_dim, "latent": latent}
    return Shard(**sizes, **widths, dtype=dtype, grad_dtype=grad_dtype)  # type: ignore[arg-type]


def request_of(shard: Shard, device: str, options: Options, *, sinks: bool) -> Request:
    """Return the request of legal tensors of these shapes; see `validate`."""
    topology, mask, config, scale, softcap, return_lse, return_max_logit, rotates = options
    ranks = Ranks(topology.size, topology.intra_size)
    Layout.of(config.layout).divisor(ranks.size)  # raises if the layout does not fit the ranks
    degrees_of(config, ranks, shard)
    scale = shard.head_dim**-0.5 if scale is None else float(scale)  # numpy's too
    softcap = None if softcap is None else float(softcap)
    return Request(
        rank=topology.rank,
        ranks=ranks,
        rates=topology.rates or default_rates(device),
        mask=mask,
        config=config,
        device=device,
        shard=shard,
        scores=Scores(scale, softcap, config.deterministic, return_max_logit),
        return_lse=return_lse,
        sinks=sinks,
        rotates=rotates,
    )
