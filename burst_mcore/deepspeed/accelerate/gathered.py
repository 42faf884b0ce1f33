"""What ranks report of an evaluation -> what one process would: each sequence once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.operations import gather_object, recursively_apply

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter, adapter_of
from burst_mcore.transformers.trainer import rows_of_ranks
from burst_mcore.wrap import around


@around
def gathering(own: Callable[..., Any], self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Accelerator.gather_for_metrics, for loaders of shards as well.

    In evaluation all ranks of a sequence group report the same: what the group's first rank has is taken,
    and samples that Accelerate added to fill the last load are left out. In training everything is gathered:
    ranks report of their shards there, unless each has the whole batch.
    """
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is None:
        return own(self, input_data, use_gather_object)
    if use_gather_object or not _is_of_tensors(input_data):
        parts = gather_object([list(input_data)])
        return [x for part in (parts if loader.deals else _of_leaders(parts, loader)) for x in part]
    if loader.deals:
        return self.gather(input_data)
    return recursively_apply(lambda x: torch.cat(_of_leaders(rows_of_ranks(x), loader)), input_data)


@around
def gathering_all(own: Callable[..., Any], self: Any, tensor: Any) -> Any:
    """Accelerator.gather, also of an evaluation's last batches, which may have unequal numbers of rows."""
    loader = adapter_of(self.gradient_state.active_dataloader)
    if loader is None or loader.last is None:
        return own(self, tensor)
    return recursively_apply(lambda x: torch.cat(rows_of_ranks(x)), tensor)


def _is_of_tensors(x: Any) -> bool:
    """Return whether lists, tuples and dicts have nothing but tensors."""
    try:
        recursively_apply(lambda each: each, x, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _of_leaders(parts: list[Any], loader: BurstSPDataLoaderAdapter) -> list[Any]:
    """Return the dataset's rows of what the first rank of each group has."""
    return [part[: loader.of_the_dataset(i, len(part))] for i, part in enumerate(parts[:: loader.size])]
