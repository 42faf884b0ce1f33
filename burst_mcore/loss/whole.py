"""The loss of a whole sharded sequence, and the gradient of each rank's part.

Engines and wrappers average gradients over all ranks, so that a term of the loss that is equal on all ranks
counts once. So a rank's part of the sequence's gradient is multiplied by the number of ranks of the sequence:
mean_r(C g_r) = sum_r g_r for C ranks. If gradients are summed, the factor is 1: the `Factor` of a model
returns it in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.layout import Layout, shard, unshard

Factor = Callable[[], float]
"""Returns, in backward, the factor of a rank's part of the gradient."""


class WholeLoss(torch.autograd.Function):
    """The sum of all ranks' parts of a loss; backward goes only to this rank's part, times the factor.

    The default `factor` is the number of ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, group: dist.ProcessGroup | None, factor: Factor | None = None
    ) -> Tensor:
        ctx.factor = factor or _ranks_of(group)
        whole = part.detach().clone()
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream * ctx.factor(), None, None


def _ranks_of(group: dist.ProcessGroup | None) -> Factor:
    return lambda: 1 if group is None else group.size()


def whole_mean(
    total: Tensor, count: Tensor | float, group: dist.ProcessGroup | None, factor: Factor | None = None
) -> Tensor:
    """Return the sum of all ranks' `total`, divided by the sum of their `count`; 0 if the count is 0.

    Backward goes only to this rank's total.
    """
    number = torch.as_tensor(count, device=total.device).detach().clone()
    if group is not None:
        dist.all_reduce(number, group=group)
    whole: Tensor = WholeLoss.apply(total, group, factor)  # type: ignore[no-untyped-call]
    return whole / torch.where(number == 0, torch.ones_like(number), number)


def gathered(part: Tensor, group: dist.ProcessGroup, layout: Layout | str, dim: int = 1) -> Tensor:
    """Return the whole tensor of the equal shards of a group's ranks, along `dim`."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return unshard(parts, dim, layout=layout)


class WholeTokens(torch.autograd.Function):
    """All-gather of a tensor of all tokens [rows, tokens, ...] from each rank's part [rows, local, ...].

    The gradient is the same on all ranks: backward takes this rank's part of it, times the factor.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, group: dist.ProcessGroup, layout: Layout | str, factor: Factor | None = None
    ) -> Tensor:
        ctx.group, ctx.layout, ctx.factor = group, layout, factor or _ranks_of(group)
        return gathered(part, group, layout)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        part = shard(upstream, 1, rank=rank, size=size, layout=ctx.layout)
        return part * ctx.factor(), None, None, None
