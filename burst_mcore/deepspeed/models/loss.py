"""The loss of a whole sequence, of which every rank has some tokens, and the gradient that ZeRO expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.deepspeed.config.settings import zero
from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.layout import Layout, shard, unshard


class WholeLoss(torch.autograd.Function):
    """The sum of all ranks' parts of a loss; backward goes to this rank's part alone, times `scale`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None, scale: float) -> Tensor:
        ctx.scale = scale
        whole = part.detach().clone()
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream * ctx.scale, None, None


class WholeTokens(torch.autograd.Function):
    """Numbers of all tokens [rows, tokens, ...] on all ranks, from each rank's part [rows, local, ...].

    Backward takes this rank's part of the gradient, which is the same on all ranks, times `scale`.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, group: dist.ProcessGroup, layout: Layout | str, scale: float
    ) -> Tensor:
        ctx.group, ctx.layout, ctx.scale = group, layout, scale
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return unshard(parts, 1, layout=layout)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return shard(upstream, 1, rank=rank, size=size, layout=ctx.layout) * ctx.scale, None, None, None


def gradient_scale(config: Mapping[str, Any], size: int) -> float:
    """Return the factor of a rank's part of the gradient, before DeepSpeed reduces it.

    ZeRO 0 to 2 divide by DP alone and so sum over the sequence group, as parts must be. ZeRO-3 divides by all
    ranks where it reduces by reduce-scatter, and by DP where it all-reduces contiguous gradients, which it
    does with reduce_scatter off.
    """
    settings = zero(config)
    return float(size) if settings.stage == 3 and _scatters(settings) else 1.0


def _scatters(settings: Any) -> bool:
    """Return whether ZeRO-3 reduces by reduce-scatter."""
    return bool(settings.reduce_scatter or not settings.contiguous_gradients)


def refuse_large_parameters(config: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> None:
    """Raise RefusedError if ZeRO-3 would take one scale for some parameters and another for the rest."""
    settings = zero(config)
    if settings.stage != 3 or _scatters(settings):
        return
    bucket = settings.reduce_bucket_size
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad]
    largest = max(sizes, default=0)
    if largest > bucket:
        raise RefusedError(
            "reduce_bucket_size",
            f"with reduce_scatter false ZeRO-3 averages parameters larger than a bucket over all ranks, "
            f"others over DP: the largest here has {largest} entries, reduce_bucket_size is {bucket:g}. "
            f"Raise it, or leave reduce_scatter on",
        )
