"""What ranks report of an evaluation -> what one process would: each sequence once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter, adapter_of
from burst_mcore.transformers.models.loss import gathered
from burst_mcore.wrap import around


@around
def gathering(own: Callable[..., Any], self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerator.gather_for_metrics, for loaders of shards as well.

    In evaluation all ranks of a sequence group report the same (a loss), or each its shard (predictions for
    its tokens), which are put together: what the group's first rank then has is taken, and samples that
    Accelerate added to fill the last load are left out. In training everything is gathered: ranks report of
    their shards there, unless each has the whole batch.
    """
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is None:
        return own(self, input_data, use_gather_object)
    once = not loader.deals or _evaluates(self, loader)
    if use_gather_object or not _is_of_tensors(input_data):
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(input_data))
        if not once:
            return [x for part in every for x in part]
        leaders = enumerate(every[:: loader.size])
        return [x for group, part in leaders for x in part[: loader.of_the_dataset(group, len(part))]]
    if not once:
        return self.gather(input_data)
    return recursively_apply(lambda x: _of_leaders(x, loader), whole(input_data, loader))


@around
def gathering_all(own: Callable[..., Any], self: Any, tensor: Any) -> Any:
    """Accelerator.gather, also of an evaluation's last batches, which may have unequal numbers of rows."""
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is None or loader.last is None or not _evaluates(self, loader):
        return own(self, tensor)
    return recursively_apply(lambda x: torch.cat(_of_ranks(x, loader)), tensor)


@around
def padding(own: Callable[..., Any], self: Any, tensor: Any, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    """Accelerator.pad_across_processes, which puts the shards of an evaluation together before."""
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is not None and dim == 1 and _evaluates(self, loader):
        tensor = whole(tensor, loader)
    return own(self, tensor, dim, *args, **kwargs)


def whole(x: Any, loader: BurstSPDataLoaderAdapter) -> Any:
    """Gather shards [rows, local, ...] of a group into [rows, tokens, ...], in nested tensors too."""

    def of(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[:2] != (loader.rows, loader.local):
            return x
        assert loader.group is not None
        return gathered(x, loader.group, loader.layout)[:, : loader.tokens]

    return recursively_apply(of, x)


def _is_of_tensors(x: Any) -> bool:
    """Return whether lists, tuples and dicts have nothing but tensors."""
    try:
        recursively_apply(lambda each: each, x, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _evaluates(accelerator: Any, loader: BurstSPDataLoaderAdapter) -> bool:
    """Return whether the reported tensors belong to a batch that the loader dealt for evaluation."""
    training = any(getattr(model, "module", model).training for model in accelerator._models)
    return loader.evaluates and not training


def _of_leaders(x: Tensor, loader: BurstSPDataLoaderAdapter) -> Tensor:
    """Return the dataset's rows of what the first rank of each group has."""
    leaders = enumerate(_of_ranks(x, loader)[:: loader.size])
    return torch.cat([part[: loader.of_the_dataset(group, len(part))] for group, part in leaders])


def _of_ranks(x: Tensor, loader: BurstSPDataLoaderAdapter) -> list[Tensor]:
    """Return the rows of every rank, of which those of a group have equally many."""
    x = x.clone()[None] if x.dim() == 0 else x.contiguous()
    rows = [len(x)] * dist.get_world_size()
    if loader.groups > 1:
        counts = [torch.empty((), dtype=torch.int64, device=x.device) for _ in rows]
        dist.all_gather(counts, torch.tensor(len(x), device=x.device))
        rows = [int(count) for count in counts]
    parts = [x.new_empty((max(rows), *x.shape[1:])) for _ in rows]
    dist.all_gather(parts, torch.cat([x, x.new_zeros((max(rows) - len(x), *x.shape[1:]))]))
    return [part[:count] for part, count in zip(parts, rows, strict=True)]
