"""The baseline that gathers K and V of the whole sequence on every rank, with the same tiles and kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_mcore.attention.geometry.launches import launches_of
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.rows import gather, scatter_views
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Problem, Scores
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
        size, n = group.size(), q.shape[1] * group.size()
        heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
        problem = Problem(q.device.type, q.dtype, heads, kv_heads, head_dim, head_dim)
        documents = mask.document_ends is not None
        problem = replace(problem, launches=launches_of(mask, n), documents=documents)
        ctx.kernel = choose("auto", problem)
        ctx.scores, ctx.size = Scores(head_dim**-0.5), size
        plan = plan_for(Layout("zigzag"), mask, n, size)
        ctx.tiles = [tiles_of(plan, group.rank(), source, ctx.kernel.abilities) for source in range(size)]
        softmax = OnlineSoftmax(q, value_dim=head_dim)
        keys, values = _gather(k, group), _gather(v, group)
        for source, met in enumerate(ctx.tiles):
            for tile in met:
                part = ctx.kernel.forward(
                    gather(q, tile.q),
                    gather(keys[source], tile.k),
                    gather(values[source], tile.k),
                    tile.pattern,
                    ctx.scores,
                )
                softmax.add(tile.q, *part)
        out, lse = softmax.result()
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        keys, values = _gather(k, ctx.group), _gather(v, ctx.group)
        delta = row_delta(dout, out)
        stand_in = output_stand_in(dout, delta)
        dq = GradientSum(q)
        dk, dv = (torch.zeros(ctx.size, *k.shape, dtype=torch.float32) for _ in range(2))
        for source, met in enumerate(ctx.tiles):
            for tile in met:
                inputs = BackwardInputs(
                    gather(dout, tile.q),
                    gather(q, tile.q),
                    gather(keys[source], tile.k),
                    gather(values[source], tile.k),
                    gather(stand_in, tile.q),
                    gather(lse, tile.q),
                    gather(delta, tile.q),
                )
                dq_t, dk_t, dv_t = ctx.kernel.backward(inputs, tile.pattern, ctx.scores)
                dq.add(tile.q, dq_t)
                for total, share in ((dk[source], dk_t), (dv[source], dv_t)):
                    for to, values_t in scatter_views(total, tile.k, share):
                        to.add_(values_t)
        return None, None, dq.result(), *(_scatter_sum(x, ctx.group).to(k.dtype) for x in (dk, dv))


def _gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of their x[this rank]: a reduce-scatter, of the collectives that gloo has."""
    shares = torch.empty_like(x)
    dist.all_to_all_single(shares, x, group=group)
    return shares.sum(0)
