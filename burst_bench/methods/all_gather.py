"""The baseline that gathers K and V of the whole sequence on every rank, with the same tiles and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_bench.methods.kernels import inputs_of, scores_of
from burst_mcore.attention.call import Keys, Queries
from burst_mcore.attention.geometry.launches import launches_of
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.rows import gather, scatter_views
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.numerics.merge import GradientSum, OnlineSoftmax
from burst_mcore.attention.numerics.rowwise import output_stand_in, row_delta
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask


def all_gather_attention(q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup, mask: Mask) -> Tensor:
    """Attention of zigzag shards [batch, local sequence, heads, head_dim]; gradients summed in float32."""
    out: Tensor = _AllGatherAttention.apply(group, mask, q, k, v)  # type: ignore[no-untyped-call]
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.group, n = group, q.shape[1] * group.size()
        heads, dims = (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3])
        problem = Problem(q.device.type, q.dtype, *heads, *dims, launches=launches_of(mask, n))
        problem = replace(problem, documents=mask.document_ends is not None)
        ctx.kernel = choose("auto", problem)
        plan, ranks = plan_for(Layout("zigzag"), mask, n, group.size()), range(group.size())
        ctx.tiles = [tiles_of(plan, group.rank(), source, ctx.kernel.abilities) for source in ranks]
        keys, values = _gather(k, group), _gather(v, group)
        softmax = OnlineSoftmax(q, value_dim=v.shape[3])
        for source, tile in _by_source(ctx.tiles):
            rows = gather(q, tile.q), gather(keys[source], tile.k), gather(values[source], tile.k)
            softmax.add(tile.q, *ctx.kernel.forward(*rows, tile.pattern, scores_of(q)))
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
        return None, None, dq.result(), *(_scatter_sum(x, ctx.group).to(k.dtype) for x in sums)


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
