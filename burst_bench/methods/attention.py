"""Attention of a sequence that is sharded over ranks: ours, an all-gather, Ulysses, and other projects'."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_bench.core import Method, World, add, missing, shareable, shared_heads
from burst_bench.methods.kernels import inputs_of, scores_of
from burst_bench.methods.sharded import RingCase, ShardedAttention, dealt, divisible
from burst_mcore import BurstConfig, Layout, Topology
from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.call import Keys, Queries
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.rows import gather, scatter_views
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Kernel
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.numerics.merge import GradientSum, OnlineSoftmax
from burst_mcore.attention.numerics.rowwise import output_stand_in, row_delta
from burst_mcore.rates import Rates


def burst(
    case: RingCase,
    world: World,
    backward: str = "auto",
    heads: int | str | None = 1,
    ring: str = "auto",
    nodes: int = 1,
    rates: Rates | None = None,
) -> ShardedAttention:
    """burst_attention on the case's layout.

    Ranks share heads in groups of `heads`, None: all. Where there are fewer nodes than `nodes`, so many are
    pretended. `rates`: those for which "auto" chooses; None: of the machine.
    """
    topology, layout = Topology.from_group(world.group, rates=rates), case.dealt
    if topology.nodes < nodes:
        topology = Topology.from_group(world.group, intra_size=world.size // nodes, rates=rates)
    degree = heads or topology.size
    config = BurstConfig(layout=layout, backward=backward, head_parallel=degree, ring=ring)
    return dealt(layout, world, partial(attended, topology=topology, mask=case.seen, config=config))


def attended(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return the output of burst_attention alone."""
    out = burst_attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def all_gather(case: RingCase, world: World) -> ShardedAttention:
    """Return attention of zigzag shards; gradients are summed in float32."""
    kernel = choose("auto", replace(case.on_kernel, device=world.device))
    plan, ranks = plan_for(Layout("zigzag"), case.seen, case.seq, world.size), range(world.size)
    tiles = [tiles_of(plan, world.rank, source, kernel.abilities) for source in ranks]
    return dealt("zigzag", world, partial(_AllGatherAttention.apply, world.group, kernel, tiles))


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, kernel: Kernel, tiles: Sequence[Sequence[Tile]], *qkv: Tensor
    ) -> Tensor:
        ctx.group, ctx.kernel, ctx.tiles, (q, k, v) = group, kernel, tiles, qkv
        keys, values = _gather(k, group), _gather(v, group)
        softmax = OnlineSoftmax(q, value_dim=v.shape[3])
        for source, tile in _by_source(tiles):
            rows = gather(q, tile.q), gather(keys[source], tile.k), gather(values[source], tile.k)
            softmax.add(tile.q, *kernel.forward(*rows, tile.pattern, scores_of(q)))
        out, lse = softmax.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        queries = Queries(q, dout, row_delta(dout, out), lse)
        stand_in, dq = output_stand_in(dout, queries.delta), GradientSum(q)
        keys, values = _gather(k, ctx.group), _gather(v, ctx.group)
        sums = [torch.zeros(ctx.group.size(), *x.shape, dtype=torch.float32) for x in (k, v)]
        for source, tile in _by_source(ctx.tiles):
            inputs = inputs_of(tile, queries, Keys(keys[source], values[source]), stand_in)
            dq_tile, *shares = ctx.kernel.backward(inputs, tile.pattern, scores_of(q))
            dq.add(tile.q, dq_tile)
            for total, share in zip(sums, shares, strict=True):
                for rows, part in scatter_views(total[source], tile.k, share):
                    rows.add_(part)
        return None, None, None, dq.result(), *(_scatter_sum(x, ctx.group).to(k.dtype) for x in sums)


def _by_source(tiles: Sequence[Sequence[Tile]]) -> Iterator[tuple[int, Tile]]:
    return ((source, tile) for source, of_source in enumerate(tiles) for tile in of_source)


def _gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of their x[this rank]: a reduce-scatter, of the collectives that gloo has."""
    shares = torch.empty_like(x)
    dist.all_to_all_single(shares, x, group=group)
    return shares.sum(0)


def _two_by(case: RingCase, device: str, *, heads: bool = False) -> str | None:
    """Return the need of a method that pairs ranks: as two nodes where there is one, or to share heads."""
    if case.ranks < 4 or case.ranks % 2:
        return f"an even number of ranks from 4 on, got {case.ranks}"
    return (shareable(case, 2) if heads else None) or divisible(case, device)


def _ulysses_needs(case: RingCase, device: str) -> str | None:
    return shareable(case, case.ranks) or divisible(case, device)


def _deepspeed_needs(case: RingCase, device: str) -> str | None:
    return shared_heads(case, case.ranks) or missing("deepspeed") or divisible(case, device)


def _deepspeed(case: RingCase, world: World) -> ShardedAttention:
    os.environ.setdefault("DS_ACCELERATOR", world.device)  # else it says at length that it looks for one
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.sequence.layer import DistributedAttention

    # Else DeepSpeed compiles a shared-memory all-reduce, which attention does not use.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        return attended(q, k, v, topology=Topology.single(), mask=case.seen)

    ulysses = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return dealt("contiguous", world, partial(ulysses, batch_dim_idx=0))


HIDDEN = Rates(intra=1e12, inter=1e11, compute=1e9, latency=0.0)
"""Links beside which a kernel is so slow that it hides every message."""
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
    Method("all-gather", all_gather, divisible, row={"method": "all-gather", "variant": "zigzag"}),
    Method(
        "deepspeed-ulysses", _deepspeed, _deepspeed_needs, ours=False,
        row={"method": "ulysses", "variant": "basic"},
    ),
)  # fmt: skip
