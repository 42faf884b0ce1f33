"""Loaders of whole sequences -> loaders of shards; a whole batch that every rank has -> a shard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from burst_mcore.agreement import integers_of
from burst_mcore.layout import Layout
from burst_mcore.transformers.data.batches import (
    READ,
    apart,
    collated,
    digest_of_batch,
    prepared,
    sharded,
)
from burst_mcore.transformers.errors import RefusedError

logger = logging.getLogger("burst_mcore")

END, FAILED = -1, -2
"""States of a rank without a batch; states of batches are digests, which are not negative."""


class ShardedLoader:
    """Iterates over a loader of whole sequences and yields this rank's part of each batch.

    Every rank of the CP group must load the same batches (`own=False`); that is checked, batch by
    batch. Or each loads its own (`own=True`, the way of UlyssesSPDataLoaderAdapter, for loaders that shard
    samples over all ranks): then they are gathered, and all ranks work on each of them in turn.

    Yields: input_ids, position_ids, shift_labels [rows, local tokens], on `device`, and what else came.

    Raises:
        RefusedError: on all ranks of the group, where a rank's batch is not legal or differs.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        group: dist.ProcessGroup | None,
        own: bool = False,
        device: torch.device | str = "cpu",
        **sharding: Any,
    ) -> None:
        self.loader, self.group, self.own, self.device = loader, group, own, device
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.shard_as(**sharding)

    def shard_as(self, *, layout: Layout | str = "zigzag", whole: bool = False, **padding: Any) -> None:
        """Pad and shard batches so from the next epoch on; `padding` as `prepared` has it.

        whole: whether batches stay as they are, for a model that shards them itself.
        """
        self.layout, self.whole = Layout.of(layout), whole
        self._how = {"multiple": self.layout.divisor(self.size), **padding}
        signature(prepared).bind({}, **self._how)  # a name that it does not have, at once

    def __len__(self) -> int:
        return len(self.loader) * (self.size if self.own else 1)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, or of its sampler, for another order of samples."""
        places: list[Any] = [self.loader, getattr(self.loader, "sampler", None)]
        for of in places:
            if hasattr(of, "set_epoch"):
                of.set_epoch(epoch)
                return

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's part of each batch."""
        batches = iter(self.loader)
        while wholes := self.agreed(lambda: self._load(batches)):
            for whole in wholes:
                yield self._part(whole)

    def _load(self, batches: Iterator[Any]) -> Any:
        return next(batches)

    def agreed(self, load: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return the whole batches that the ranks load here; none where loads have ended. Collective."""
        batch, state = None, END
        problem: Exception | None = None
        try:
            batch = self._prepared(_mapping(load()))
            state = digest_of_batch(apart(batch)[0] if self.whole else batch)
        except StopIteration:
            pass
        except Exception as error:  # of any kind: the others must not wait for this rank
            state, problem = FAILED, error
        table = [[state]] if self.group is None else integers_of(self.group, [state])
        states = [state for (state,) in table]
        if problem is not None:
            raise problem
        if FAILED in states:
            raise RefusedError("another rank", f"rank {states.index(FAILED)} of the group has no batch")
        if END in states:
            if set(states) != {END}:
                ended = [rank for rank, state in enumerate(states) if state == END]
                raise RefusedError("loader", f"it ended on ranks {ended} of the CP group before others")
            return []
        assert batch is not None
        return self._wholes(batch, states)

    def _prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch that was loaded, ready to be sharded."""
        here = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        return here if self.whole else prepared(here, **self._how)

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        if self.whole:
            return self._on_device(whole)
        return self._on_device(sharded(whole, rank=self.rank, size=self.size, layout=self.layout))

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {k: x.to(self.device) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}

    def _wholes(self, batch: dict[str, Any], states: list[int]) -> list[dict[str, Any]]:
        if self.own and self.group is not None:
            every: list[dict[str, Any]] = [{} for _ in range(self.size)]
            dist.all_gather_object(every, batch, group=self.group)
            return every
        if len(set(states)) > 1:
            raise RefusedError(
                "batch",
                "ranks of a CP group were given different whole batches. Shard samples over data-parallel "
                "ranks, DistributedSampler(num_replicas=world // SP, rank=rank // SP), with the same seed "
                "on all; or, if every rank of a loader shall bring its own, pass own=True",
            )
        return [batch]


def shard_of_whole_batch(
    arguments: Mapping[str, Any], sharding: Mapping[str, Any], group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a forward's arguments with this rank's shard of their whole batch, and that batch. Collective.

    Args:
        arguments: input_ids, labels and attention_mask [rows, tokens], the same on all ranks of the group;
            lists of numbers are read as well; what else is no tensor stays.
        sharding: how batches are sharded: keyword arguments of `ShardedLoader`.

    Raises:
        RefusedError: on all ranks, where a rank's batch is not legal or differs.
    """
    batch = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) or name in READ}
    ids = arguments.get("input_ids")
    device = getattr(arguments.get("inputs_embeds") if ids is None else ids, "device", "cpu")
    sharder = ShardedLoader((), group=group, device=device, **sharding)
    (whole,) = sharder.agreed(lambda: batch)
    return {**{n: x for n, x in arguments.items() if n not in batch}, **sharder._part(whole)}, whole


def loader_for(
    data: Any,
    *,
    batch_size: int,
    group: dist.ProcessGroup | None,
    collate_fn: Callable | None = None,
    drop_last: bool = False,
    **options: Any,
) -> ShardedLoader:
    """Return the loader of a dataset, sharded over data-parallel ranks as DeepSpeed does, or of a DataLoader.

    A DataLoader keeps its sampler; one whose DistributedSampler shards over all ranks brings each rank's own.
    What shards nothing itself, a plain DataLoader or an IterableDataset, is the same on every data-parallel
    rank; a warning says so.
    """
    size = 1 if group is None else dist.get_world_size(group)
    replicas, own = dist.get_world_size() // size, False
    _warn_of_repeated(data, replicas)
    if isinstance(data, DataLoader):
        own = size > 1 and getattr(data.sampler, "num_replicas", None) == dist.get_world_size()
    elif isinstance(data, Dataset) or hasattr(data, "__getitem__"):
        sampler: Any = None
        if not isinstance(data, IterableDataset):
            sampler = DistributedSampler(data, num_replicas=replicas, rank=dist.get_rank() // size)
        data = DataLoader(
            data, batch_size, sampler=sampler, collate_fn=collate_fn or collated, drop_last=drop_last
        )
    return ShardedLoader(data, group=group, own=own, **options)


def _warn_of_repeated(data: Any, replicas: int) -> None:
    dataset = data.dataset if isinstance(data, DataLoader) else data
    whole = isinstance(data, DataLoader) and type(data.sampler) in (SequentialSampler, RandomSampler)
    if replicas > 1 and (whole or isinstance(dataset, IterableDataset)) and dist.get_rank() == 0:
        logger.warning(
            f"{replicas} data-parallel ranks each take all samples of this {type(data).__name__}, which does "
            "not shard them: train on a dataset, on a DataLoader with DistributedSampler(num_replicas="
            f"{replicas}, rank=rank // SP), or on an IterableDataset that yields each its own"
        )


def _mapping(batch: Any) -> Mapping[str, Any]:
    """Return a batch as a mapping; tokens alone are input_ids."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, torch.Tensor):
        return {"input_ids": batch}
    raise RefusedError("batch", f"it must be a dict with input_ids, or a tensor; got {type(batch).__name__}")
