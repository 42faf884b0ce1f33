"""The baseline that gathers K and V of the whole sequence on every rank, with the same tiles and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_bench.core import World
from burst_bench.methods.kernels import inputs_of, scores_of
from burst_bench.methods.sharded import RingCase, ShardedAttention, dealt
from burst_mcore.attention.call import Keys, Queries
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.rows import gather, scatter_views
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Kernel
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.numerics.merge import GradientSum, OnlineSoftmax
from burst_mcore.attention.numerics.rowwise import output_stand_in, row_delta
from burst_mcore.layout import Layout


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
