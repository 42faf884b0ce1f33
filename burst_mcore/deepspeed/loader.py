"""Accelerate's loaders for CP groups: all ranks of a group get the batches of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from accelerate.utils.operations import concatenate, find_batch_size, slice_tensors
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler

from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.transformers.data.batches import WHOLE, apart, prepared
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.strategies import LoadedBatch
from burst_mcore.wrap import around, while_set


class BurstSPDataLoaderAdapter(ShardedLoader):
    """Takes the place of UlyssesSPDataLoaderAdapter: the batches of a CP group, which its model shards.

    Batches need no position_ids and may be of any length; beside labels are shift_labels. Of D sequence
    groups, group g works on batches g, D + g, ... of the dataset, as process g of D does that share no
    sequences.

    Args:
        own: every rank loads batches of its own, and all work on each in turn, as over a loader that
            Accelerate did not prepare. Loaders of `sharding_to_groups` give all ranks of a group the same.
    """

    def __init__(
        self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any, *, own: bool = True
    ) -> None:
        if isinstance(dl, BurstSPDataLoaderAdapter):  # the Trainer adapts what Accelerate has prepared
            dl, own = dl.dl, dl.own
        self.dl: Any = dl
        super().__init__(dl, group=sp_group, own=own, device=device)
        self.place, self.groups = dist.get_rank() // self.size, dist.get_world_size() // self.size
        """Which CP group this is, of how many."""
        self.evaluates = False
        """Whether the epoch that runs is one of evaluation: the model was not training when it began."""
        self.last: tuple[int, int] | None = None
        """Of an evaluation's last load: samples that all groups have of the dataset, samples of a batch."""
        samplers = [getattr(dl, name, None) for name in ("batch_sampler", "sampler")]
        samplers.append(getattr(samplers[0], "batch_sampler", None))  # of one that skips batches
        self._sharder: Any = next((x for x in samplers if hasattr(x, "num_processes")), None)
        """Accelerate's sampler that distributes batches over several groups."""
        self._batches: Any = getattr(self._sharder, "batch_sampler", samplers[0])
        """The sampler of one process."""
        self._dispatched = hasattr(dl, "slice_fn")
        """Whether rank 0 reads for all. Then a load is one batch, which every rank gets whole."""
        self.loads = self.groups if self._dispatched else 1
        """Loads of Accelerate's, of which this group takes one."""
        if self._dispatched:
            dl.state = SimpleNamespace(num_processes=1, process_index=dist.get_rank(), device=dl.state.device)
            dl.slice_fn = lambda batch, *_, **__: batch
            if self.groups > 1 and (inner := getattr(dl, "base_dataloader", None)) is not None:
                inner.__iter__ = partial(self._for_all_groups, inner.__iter__)  # Accelerate calls this name

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of a loader (its dataset, its samplers) from the inner loader."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __len__(self) -> int:
        dropped = self._dispatched and self.dl._drop_last and not self.evaluates
        return (super().__len__() + (0 if dropped else self.loads - 1)) // self.loads

    def __iter__(self) -> Iterator[dict[str, Any]]:
        strategy = _strategies.get(id(self.group))
        if strategy is not None:
            self.shard_as(**strategy.of.sharding)
            self.evaluates = not strategy.of.model.training
        vars(self.dl)[_ADAPTER] = self
        if self.groups > 1:
            self._refuse_parts()
        with ExitStack() as stack:
            if self.evaluates and strategy is not None:
                strategy.evaluations.add(id(stack))
                stack.callback(strategy.evaluations.discard, id(stack))
            if self.evaluates and self._sharder is not None:
                stack.enter_context(while_set(self._sharder, **_BY_WHOLE_BATCHES))
            yield from super().__iter__()

    def _refuse_parts(self) -> None:
        """Raise RefusedError where a group's batches are not those of a process.

        Nobody knows with how much Accelerate fills the last of an evaluation.
        """
        split = any(getattr(x, "split_batches", False) for x in (self.dl, self._sharder))
        known = self._dispatched or self._sharder is not None or self.own
        if split and (self.evaluates or self._dispatched):
            name = "split_batches"
        elif self.evaluates and not known:
            name = "dispatch_batches=False for a streamed dataset"
        else:
            return
        text = f"Accelerate's {name} is not supported with several CP groups: leave it out"
        raise RefusedError("loader", text)

    def _load(self, batches: Iterator[Any]) -> Any:
        """Return this group's batch; in evaluation a group for which none is left works on another's."""
        loads = [next(batches)]
        while len(loads) < self.loads and not self.dl.end_of_dataloader:
            loads.append(next(batches))
        ended = self.evaluates and getattr(self.dl, "end_of_dataloader", False)
        self.last = self._last_load(len(loads)) if ended else None
        return loads[self.place % len(loads)]

    def _last_load(self, loads: int) -> tuple[int, int]:
        """Return (samples of the dataset in the last load, samples in a full batch).

        In batches where the sampler does not say how many samples a batch has.
        """
        if self._dispatched:
            size = self.dl.batch_size or 1
            return (loads - 1) * size + self.dl.remainder, size
        sharder = self._batches if self._sharder is None else self._sharder
        first = (len(sharder) - 1) * self.groups
        if type(self._batches) is not BatchSampler:
            return len(self._batches) - first, 1
        size = self._batches.batch_size
        samples = min(len(self._batches.sampler), len(self._batches) * size)  # type: ignore[arg-type]
        return samples - first * size, size

    def counted(self, parts: list[Any]) -> list[Any]:
        """Return of the ranks' reports of a batch what counts: those of the first rank of each group.

        In an evaluation's last load some groups may have no batch of the dataset, or a short one. All count
        where the model evaluates while it is trained on these batches: they are of other ones.
        """
        strategy = _strategies.get(id(self.group))
        if strategy is not None and strategy.of.model.training == self.evaluates:
            return parts
        return [part[: self._of_the_dataset(i, len(part))] for i, part in enumerate(parts[:: self.size])]

    def _of_the_dataset(self, group: int, reported: int) -> int:
        """Return how many of the numbers that a group reported of its batch are of the dataset.

        Args:
            reported: one for each row, or one of the batch, or one as often as a full batch has rows.
        """
        if self.last is None:
            return reported
        left, size = self.last
        count = min(max(left - group * size, 0), size)
        return reported if count and reported != size else min(count, reported)

    def _prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        here = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items()}
        if is_of_preferences(batch) or (self.evaluates and "labels" not in batch):
            return here
        shifted = prepared(apart(here)[0], **{**self._how, "multiple": 1})["shift_labels"]
        return {"labels": here.get("input_ids"), **here, "shift_labels": shifted, WHOLE: torch.ones(())}

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        return self._on_device(whole)

    def _for_all_groups(self, iterates: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield batches of training so that each group gets one of every load, as one process a group does.

        The last rows are shared out evenly, with the first ones of the epoch behind them, or dropped. Batches
        of other lengths than the first ones are not cut: groups without one get a whole one of the first.
        """
        batches, first = iterates(), list[Any]()
        if self.evaluates:
            yield from batches
            return
        while load := [*islice(batches, self.groups)]:
            first, rows = first or load, sum(map(find_batch_size, load))
            if rows < self.groups * find_batch_size(load[0]):
                if self.dl._drop_last:
                    return
                load += (first * self.groups)[: self.groups]
                if len({str([x.shape[1:] for x in tree_leaves(batch)]) for batch in load}) == 1:
                    whole, each = concatenate(load), -(-rows // self.groups)
                    load = [slice_tensors(whole, slice(i * each, (i + 1) * each)) for i in range(self.groups)]
            yield from load[: self.groups]


_BY_WHOLE_BATCHES = {"batch_size": None, "drop_last": False, "even_batches": True}
"""How a sharder of Accelerate's fills an evaluation's last load with whole batches, and drops none of it.

Without a size a short batch stays as it is. A batch that the user drops is not in the sharder's own sampler.
"""
_ADAPTER = "burst_mcore_adapter"
"""The attribute of a loader of Accelerate's that has the adapter which goes over it."""
_strategies: WeakValueDictionary[int, LoadedBatch] = WeakValueDictionary()
"""By CP group, which is never freed, that of the model that was prepared last: batches are its own."""


def shard_for(strategy: LoadedBatch) -> None:
    """Shard the batches of its group's adapters for a model, from their next epoch on."""
    _strategies[id(strategy.of.group)] = strategy


def adapter_of(loader: Any) -> BurstSPDataLoaderAdapter | None:
    """Return the adapter that goes over a loader of Accelerate."""
    return None if loader is None else vars(loader).get(_ADAPTER)


def is_of_preferences(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch is one of TRL's preference trainers, whose loss is no sum over labels."""
    return "completion_mask" in batch and "labels" not in batch and "shift_labels" not in batch


def group_of(parallelism: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share sequences by Accelerate's ParallelismConfig; None where none do."""
    if parallelism is None or parallelism.sp_backend != "deepspeed" or not parallelism.sp_enabled:
        return None
    return unit_of(parallelism.sp_size).sequence


@around
def sharding_to_groups(own: Callable[..., Any], dataloader: Any, device: Any = None, **options: Any) -> Any:
    """accelerate's prepare_data_loader: each CP group is one process, whose batches come from here."""
    from accelerate.state import AcceleratorState

    group = group_of(AcceleratorState().parallelism_config)
    if group is None:
        return own(dataloader, device, **options)
    groups, place = dist.get_world_size() // group.size(), dist.get_rank() // group.size()
    options |= {"num_processes": groups, "process_index": place, "torch_device_mesh": None}
    loader = own(dataloader, device, **options)
    if groups == 1 and not hasattr(loader, "slice_fn"):  # for one process Accelerate leaves the order to it
        loader.rng_types = [*(loader.rng_types or ()), "torch"]
        generator = getattr(loader.get_sampler(), "generator", None)
        if isinstance(generator, torch.Generator):  # a script may have seeded it by rank
            loader.synchronized_generator = generator
            loader.rng_types.append("generator")
    return BurstSPDataLoaderAdapter(loader, group.rank(), group, group.size(), device, own=False)


@around
def skipping(own: Callable[[Any, int], Any], dataloader: Any, num_batches: int = 0) -> Any:
    """accelerate.skip_first_batches, which knows our adapter as well."""
    if not isinstance(dataloader, BurstSPDataLoaderAdapter):
        return own(dataloader, num_batches)
    ours, later = dataloader, own(dataloader.dl, num_batches * dataloader.loads)
    return BurstSPDataLoaderAdapter(later, ours.rank, ours.group, ours.size, ours.device, own=ours.own)
