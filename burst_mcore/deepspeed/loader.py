"""Accelerate's loaders, told that the ranks of a CP group are one process: their batches are equal."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import AcceleratorState
from accelerate.utils.operations import find_batch_size

from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.models.sequence import evaluates
from burst_mcore.transformers.trainer import sharing
from burst_mcore.wrap import around


class BurstSPDataLoaderAdapter(ShardedLoader):
    """Stands for UlyssesSPDataLoaderAdapter: every rank loads its own batches, and all work on each in turn.

    Batches are whole, may be of any length, and need no position_ids: their model shards them.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        super().__init__(dl, group=sp_group, own=True, device=device, whole=True)


def adapted(dl: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a loader whose batches are equal on the ranks of a group; those of Accelerate's loaders are."""
    return dl if isinstance(dl, DataLoaderStateMixin) else BurstSPDataLoaderAdapter(dl, *args, **kwargs)


def _groups() -> tuple[int, int]:
    """Return how many processes Accelerate has in CP groups' stead, and which of them this rank is of."""
    size = sharing(AcceleratorState(), "sp_size")
    return dist.get_world_size() // size, dist.get_rank() // size


@around
def sharding_to_groups(
    original: Callable[..., Any], dataloader: Any, device: Any = None, **options: Any
) -> Any:
    """accelerate's prepare_data_loader: each CP group is one process."""
    if sharing(AcceleratorState(), "sp_size") == 1:
        return original(dataloader, device, **options)
    groups, place = _groups()
    options |= {"num_processes": groups, "process_index": place, "torch_device_mesh": None}
    loader = original(dataloader, device, **options)
    if groups == 1 and not hasattr(loader, "slice_fn"):  # for one process Accelerate leaves the order to it
        loader.rng_types = [*(loader.rng_types or ()), "torch"]
        generator = getattr(loader.get_sampler(), "generator", None)
        if isinstance(generator, torch.Generator):  # a script may have seeded it by rank
            loader.synchronized_generator = generator
            loader.rng_types.append("generator")
    return loader


@around
def dispatching_to_groups(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """DataLoaderDispatcher.__init__: rank 0 reads for all, and the ranks of a group get the same rows.

    In training rows are shared out evenly. In evaluation a group gets a batch, as one process has it.
    """
    init(self, *args, **kwargs)
    if sharing(AcceleratorState(), "sp_size") == 1:
        return
    (groups, place), original = _groups(), self.slice_fn

    def rows_of_group(batch: Any, rows: slice, **others: Any) -> Any:
        count = self.batch_size or 1 if evaluates() else rows.stop - rows.start
        first = place * count if rows.start else 0  # the first batch, of which rows are repeated, begins at 0
        if first >= find_batch_size(batch):  # no row is left: what is reported of others is cut off
            first = 0
        return original(batch, slice(first, first + count), **others)

    self.slice_fn = rows_of_group
    self.state = SimpleNamespace(
        num_processes=groups, process_index=dist.get_rank(), device=self.state.device
    )
