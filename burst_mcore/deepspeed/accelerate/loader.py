"""Accelerate's loaders -> loaders of shards: a sequence group works on the batch of each rank in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from burst_mcore.deepspeed.batches import IGNORED
from burst_mcore.deepspeed.loader import ShardedLoader


class BurstSPDataLoaderAdapter(ShardedLoader):
    """Stands where UlyssesSPDataLoaderAdapter stands: every rank loads its own, and all work on each in turn.

    Batches need no position_ids and may be of any length; labels are shifted here, and handed out unshifted
    as well. With D sequence groups, micro-batch i of group g is batch i D + g of the dataset: the batches
    that D processes without sequence parallelism would work on. Batches of preferences (TRL's DPO, which
    have a completion_mask) are not dealt: every rank of the group is given the whole batch, and the model
    deals it.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        super().__init__(dl, group=sp_group, own=True, device=device)
        self.turn, self.last, self.tokens = 0, False, 0
        self.evaluates = False
        """Whether turns are left out that have only samples which Accelerate filled the last load up with."""
        self._skipped = 0
        self._batches: Iterator[dict[str, Any]] | None = None
        _take_turns(dl, self.size)

    def __getattr__(self, name: str) -> Any:
        """What is asked of a loader besides (its dataset, its samplers) is the inner loader's."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.deal_as(**_dealing.get(id(self.group), {}))
        _adapters[self.dl] = self
        return super().__iter__()

    def __next__(self) -> dict[str, Any]:
        """The next of the epoch; the adapter that it stands for is an iterator."""
        self._batches = self._batches or iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    def valid(self, rows: int) -> int:
        """How many of `rows` that the leading ranks of all groups gathered in this turn are of the dataset.

        Accelerate fills the last load up with samples from the beginning; they come last.
        """
        remainder = getattr(self.dl, "remainder", -1)
        if not self.last or remainder <= 0:
            return rows
        groups = dist.get_world_size() // self.size
        mine = min(max(remainder - self.turn * self._samples, 0), self._samples)
        return -(-mine * rows // self._samples) if rows % groups == 0 else rows

    def without(self, batches: int, skip: Callable[[Any, int], Any]) -> BurstSPDataLoaderAdapter:
        """A loader that begins `batches` micro-batches later; `skip` does so for a loader of Accelerate's."""
        loads, turns = divmod(batches, self.size)
        found = BurstSPDataLoaderAdapter(skip(self.dl, loads), self.rank, self.group, self.size, self.device)
        found._skipped = turns
        return found

    def _prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if is_of_preferences(batch):
            return dict(batch)
        found, tokens = super()._prepared(batch), batch["input_ids"].shape[1]
        if isinstance(batch.get("labels"), Tensor):
            padding = found["input_ids"].shape[1] - tokens
            found["labels"] = pad(batch["labels"], (0, padding), value=IGNORED)
        return {**found, _TOKENS: tokens}

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        if is_of_preferences(whole):
            return self._on_device(whole)
        self.tokens = whole.pop(_TOKENS)
        return super()._part(whole)

    def _in_turn(self, wholes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Accelerate is told of the end of its loader in the last turn, not when the last load comes."""
        self.last = bool(getattr(self.dl, "end_of_dataloader", False))
        first, self._skipped = self._skipped, 0
        turns = len(wholes)
        if self.evaluates and self.last and self.dl.remainder > 0:
            turns = min(turns, -(-self.dl.remainder // self._samples))
        for self.turn in range(first, turns):
            if self.last:
                self.dl.end_of_dataloader = self.turn == turns - 1
            yield wholes[self.turn]

    @property
    def _samples(self) -> int:
        """Of all groups, a turn."""
        return int(self.dl.total_batch_size) // self.size


_TOKENS = "burst_mcore_tokens"
"""The key under which a whole batch says how many tokens it had before padding."""
_dealing: dict[int, dict[str, Any]] = {}
"""How batches are dealt to the model that was prepared last, by sequence group, which is never freed."""
_adapters: WeakKeyDictionary[Any, BurstSPDataLoaderAdapter] = WeakKeyDictionary()
"""By the loader of Accelerate's that each goes over."""


def deal_as(group: Any, dealing: dict[str, Any]) -> None:
    """Deal the batches of a group's adapters so, from their next epoch on."""
    _dealing[id(group)] = dealing


def adapter_of(loader: Any) -> BurstSPDataLoaderAdapter | None:
    """The adapter that goes over a loader of Accelerate's."""
    return None if loader is None else _adapters.get(loader)


def is_of_preferences(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is one of TRL's preference trainers, whose loss is no sum over labels."""
    return "completion_mask" in batch and "labels" not in batch and "shift_labels" not in batch


def skipping(own: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """accelerate.skip_first_batches, which knows our adapter as well."""

    @wraps(own)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, BurstSPDataLoaderAdapter):
            return dataloader.without(num_batches, own)
        return own(dataloader, num_batches)

    return skip_first_batches


def _take_turns(loader: Any, size: int) -> None:
    """Have rank j of group g load the batches that the group works on in turn j, in the dataset's order.

    Accelerate gives process p of W batches p, p + W, ...; consecutive processes share a sequence here, and
    would work on batches that lie apart.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    group, turn = divmod(rank, size)
    index = turn * (world // size) + group
    for dealer in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if getattr(dealer, "num_processes", None) == world and hasattr(dealer, "process_index"):
            dealer.process_index = index  # type: ignore[union-attr]
