"""Attention of a sequence that is sharded over ranks: its cases, ours with several settings, and Ulysses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_bench.core import Case, Method, World, add, missing, shareable, shared_heads
from burst_mcore import BurstConfig, Topology
from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.layout import Layout, shard, unshard
from burst_mcore.rates import Rates
from burst_plan.explain.predict import layout_of
from burst_plan.explain.problem import LayerProblem

AttendedBy = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Differentiable attention of local q, k, v [batch, local sequence, heads, head_dim]."""


class RingCase(Case, LayerProblem):
    """Attention of a sequence that is sharded over ranks."""

    ranks: int = 4
    seq: int = 16384
    heads: int = 8
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 64
    layout: str = "zigzag"
    """The layout of the sequence in our methods; "auto": the best for the mask."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        Case.__post_init__(self)
        LayerProblem.__post_init__(self)

    @property
    def sharded(self) -> Layout:
        return layout_of(self.layout, self, Ranks(self.ranks, self.ranks))


@dataclass(frozen=True)
class ShardedAttention:
    """A method of the kind "attention", on one rank."""

    layout: Layout | str
    """The layout of the sequence that the method needs."""
    world: World
    attend: AttendedBy

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor [batch, sequence, ...]."""
        return shard(x, 1, rank=self.world.rank, size=self.world.size, layout=self.layout)

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor of the parts of all ranks."""
        return unshard(parts, 1, layout=self.layout)


def share_of(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Shard:
    """Return a rank's share of one sequence, values as wide as keys."""
    return Shard(
        batch=1, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim,
        dtype=dtype,
    )  # fmt: skip


def divisible(case: RingCase, device: str) -> str | None:
    """Return the unmet requirement of a method for shards of one length; None if the case meets it."""
    unit = 2 * case.ranks
    return f"a sequence that is a multiple of {unit}, got {case.seq}" if case.seq % unit else None


def burst(
    case: RingCase,
    world: World,
    backward: str = "auto",
    heads: int | str | None = 1,
    ring: str = "auto",
    nodes: int = 1,
    rates: Rates | None = None,
) -> ShardedAttention:
    """Return burst_attention on the case's layout.

    Ranks share heads in groups of `heads`, None: all. On fewer nodes than `nodes`, that many are assumed.
    `rates`: those of the cost model of "auto"; None: the machine's.
    """
    topology, layout = Topology.from_group(world.group, rates=rates), case.sharded
    if topology.nodes < nodes:
        topology = Topology.from_group(world.group, intra_size=world.size // nodes, rates=rates)
    degree = heads or topology.size
    config = BurstConfig(layout=layout, backward=backward, head_parallel=degree, ring=ring)
    attend = partial(attended, topology=topology, mask=case.seen, config=config)
    return ShardedAttention(layout, world, attend)


def attended(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return only the output of burst_attention."""
    out = burst_attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def _two_by(case: RingCase, device: str, *, heads: bool = False) -> str | None:
    """Return the unmet requirement of a method that pairs ranks: as two nodes of one, or to share heads."""
    if case.ranks < 4 or case.ranks % 2:
        return f"an even number of ranks from 4 on, got {case.ranks}"
    return (shareable(case, 2) if heads else None) or divisible(case, device)


def _ulysses_needs(case: RingCase, device: str) -> str | None:
    return shareable(case, case.ranks) or divisible(case, device)


def _deepspeed_needs(case: RingCase, device: str) -> str | None:
    return shared_heads(case, case.ranks) or missing("deepspeed") or divisible(case, device)


def start_deepspeed(device: str) -> None:
    """Initialise DeepSpeed for a device, quietly."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # else it prints its long search for one
    import deepspeed

    from burst_mcore.deepspeed.cpu import prepare_cpu

    prepare_cpu()
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl", verbose=False)


def _deepspeed(case: RingCase, world: World) -> ShardedAttention:
    start_deepspeed(world.device)
    from deepspeed.sequence.layer import DistributedAttention

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return attended(q, k, v, topology=Topology.single(), mask=case.seen)

    ulysses = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return ShardedAttention("contiguous", world, partial(ulysses, batch_dim_idx=0))


HIDDEN = Rates(intra=1e12, inter=1e11, compute=1e9, latency=0.0)
"""Rates at which a kernel is slow enough to hide every message."""
add(
    "attention",
    Method("burst", burst, divisible),
    Method("burst-auto", partial(burst, heads="auto"), divisible),
    Method(
        "burst-auto-hidden", partial(burst, heads="auto", nodes=2, rates=HIDDEN), _two_by
    ),
    Method(
        "burst-query", partial(burst, backward="query", ring="double"), divisible, row={"method": "burst"}
    ),
    Method("burst-kv", partial(burst, backward="kv"), divisible),
    Method("burst-ulysses", partial(burst, heads=None), _ulysses_needs, row={"method": "ulysses"}),
    Method("ring", partial(burst, ring="flat", backward="kv"), divisible, row={"method": "ring"}),
    Method(
        "double-ring", partial(burst, ring="double", backward="kv", nodes=2), _two_by,
        row={"method": "double-ring"},
    ),
    Method(
        "usp", partial(burst, heads=2, ring="flat", backward="kv"), partial(_two_by, heads=True),
        row={"method": "usp", "head_parallel": 2},
    ),
    Method(
        "deepspeed-ulysses", _deepspeed, _deepspeed_needs, ours=False,
        row={"method": "ulysses", "variant": "basic"},
    ),
)  # fmt: skip
