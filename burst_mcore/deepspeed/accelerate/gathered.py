"""What ranks report of an evaluation -> what one process would: each sequence once, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter, adapter_of
from burst_mcore.layout import unshard


def gathering(own: Callable[..., Any]) -> Callable[..., Any]:
    """Accelerator.gather_for_metrics, for loaders of shards as well.

    In evaluation all ranks of a sequence group report the same (a loss, or predictions for whole sequences):
    those of its first rank are taken, and samples that Accelerate added to fill the last load are left out.
    In training everything is gathered: ranks report of their shards there.
    """

    @wraps(own)
    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        loader = adapter_of(self.gradient_state.active_dataloader)
        if loader is None:
            return own(self, input_data, use_gather_object)
        evaluates = not any(getattr(model, "module", model).training for model in self._models)
        if use_gather_object or not _is_of_tensors(input_data):
            mine = input_data if not evaluates or loader.rank == 0 else type(input_data)()
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, mine)
            found = [x for part in every for x in part]
            return found[: loader.valid(len(found))] if evaluates else found
        found = self.gather(input_data)
        return _applied(lambda x: _of_leaders(x, loader), found) if evaluates else found

    return gather_for_metrics


def whole(x: Any, loader: BurstSPDataLoaderAdapter, local: int) -> Any:
    """Shards [rows, local, ...] of all ranks of a group -> [rows, tokens, ...], in tensors however nested."""

    def of(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != local:
            return x
        parts = [torch.empty_like(x) for _ in range(loader.size)]
        dist.all_gather(parts, x.contiguous(), group=loader.group)
        found: Tensor = unshard(parts, 1, layout=loader.layout)[:, : loader.tokens]
        return found

    return _applied(of, x)


def _of_leaders(x: Tensor, loader: BurstSPDataLoaderAdapter) -> Tensor:
    """Of rows gathered from all ranks, those of the first rank of each group that are of the dataset."""
    world = dist.get_world_size()
    if x.dim() == 0 or len(x) % world:
        return x
    rows: Tensor = x.unflatten(0, (world // loader.size, loader.size, -1))[:, 0].flatten(0, 1)
    return rows[: loader.valid(len(rows))]


def _is_of_tensors(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(_is_of_tensors, x.values()))
    return all(map(_is_of_tensors, x)) if isinstance(x, list | tuple) else isinstance(x, Tensor)


def _applied(do: Callable[[Tensor], Tensor], x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _applied(do, each) for name, each in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_applied(do, each) for each in x)
    return do(x) if isinstance(x, Tensor) else x
