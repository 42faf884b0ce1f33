"""A call of burst attention over ranks: what a rank has of it, and the whole sequence on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from dense import Problem, Result
from torch import Tensor

from burst_mcore import BurstConfig, Mask, Topology, burst_attention, shard, unshard
from burst_mcore.attention.geometry.shard import Shard


def own_results(
    p: Problem, mask: Mask, rank: int, size: int, config: BurstConfig, topology: Topology | None = None
) -> Result:
    """This rank's shares of a forward and a backward."""
    topology = topology or Topology.from_group(dist.group.WORLD)
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout) for x in p)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*inputs, topology=topology, mask=mask, config=config, return_lse=True)
    assert out.shape == dout.shape
    out.backward(dout)
    return Result(out.detach(), lse.detach(), *(x.grad for x in inputs))


def shape_of(p: Problem, tokens: int, **more: object) -> Shard:
    """The shape of a call on the shards of a problem, of so many tokens each: what costs are counted of."""
    (batch, _, heads, head_dim), (*_, kv_heads, _), value_dim = p.q.shape, p.k.shape, p.v.shape[3]
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads}
    return Shard(**sizes, head_dim=head_dim, value_dim=value_dim, dtype=p.q.dtype, **more)


def whole(part: Tensor, size: int, layout: object) -> Tensor:
    """The whole sequence of a tensor [batch, tokens of the rank, ...]; ranks may hold unequal numbers."""
    parts = [part] if size == 1 else [torch.empty(0)] * size
    if size > 1:
        dist.all_gather_object(parts, part)
    return unshard(parts, 1, layout=layout)


def whole_results(
    p: Problem, mask: Mask, rank: int, size: int, config: BurstConfig, topology: Topology | None = None
) -> Result:
    """The results of the whole sequence, on every rank."""
    return Result(
        *(whole(x, size, config.layout) for x in own_results(p, mask, rank, size, config, topology))
    )
