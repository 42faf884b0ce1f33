"""Accelerate's loaders -> loaders of shards: a sequence group works on the batch of each rank in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from burst_mcore.deepspeed.data.batches import CUMULATED, IGNORED
from burst_mcore.deepspeed.data.loader import ShardedLoader
from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.deepspeed.models.sequence import SequenceParallel


class BurstSPDataLoaderAdapter(ShardedLoader):
    """Takes the place of UlyssesSPDataLoaderAdapter: every rank loads batches, and all work on each in turn.

    Batches need no position_ids and may be of any length; labels are shifted here, and in evaluation handed
    out unshifted as well. With D sequence groups, micro-batch i of group g is batch i D + g of the dataset:
    the batches that D processes without sequence parallelism would work on. Batches of preferences (TRL's
    DPO, which have a completion_mask) are not dealt: every rank of the group is given the whole batch, and
    the model deals it.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        super().__init__(dl, group=sp_group, own=True, device=device)
        self.evaluates = False
        """Whether the epoch that runs is one of evaluation: the model was not training when it began."""
        self.turn, self.last = 0, False
        """Of the load that is dealt: whose batch, and whether the load is the last."""
        self.rows, self.tokens, self.local = 0, 0, 0
        """Of the batch that was handed out: rows, tokens before padding, tokens of a shard."""
        self._skipped = 0
        self._batches: Iterator[dict[str, Any]] | None = None
        self._in_order = _take_turns(dl, self.size)
        self._newest = _Newest(dl)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of a loader (its dataset, its samplers) from the inner loader."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        sequence = _sequences[id(self.group)]() if id(self.group) in _sequences else None
        if sequence is not None:
            self.deal_as(**sequence.dealing)
            self.evaluates = not sequence.model.training
        _adapters[self.dl] = ref(self)
        return super().__iter__()

    def __next__(self) -> dict[str, Any]:
        """Return the next batch of the epoch; Accelerate's adapter is an iterator, too."""
        self._batches = self._batches or iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    def of_the_dataset(self, rows: int) -> list[int]:
        """Return how many of the `rows` reported numbers count in this turn, for each sequence group.

        Accelerate fills the last load up with samples from the beginning of the dataset, which do not.

        Args:
            rows: as many as a batch has, or 1 where a batch has one number.
        """
        groups = dist.get_world_size() // self.size
        remainder = getattr(self.dl, "remainder", -1)
        if not self.last or remainder <= 0:
            return [rows] * groups
        places = [
            self.turn * groups + group if self._in_order else group * self.size + self.turn
            for group in range(groups)
        ]
        mine = [min(max(remainder - place * self.rows, 0), self.rows) for place in places]
        return [-(-count * rows // self.rows) for count in mine]

    def without(self, batches: int, skip: Callable[[Any, int], Any]) -> BurstSPDataLoaderAdapter:
        """Return a loader that begins `batches` micro-batches later; `skip` skips loads of Accelerate's."""
        loads, turns = divmod(batches, self.size)
        later = BurstSPDataLoaderAdapter(skip(self.dl, loads), self.rank, self.group, self.size, self.device)
        later._skipped = turns
        return later

    def _prepared(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if is_of_preferences(batch):
            return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items()}
        whole, tokens = super()._prepared(batch), batch["input_ids"].shape[1]
        labels = batch.get("labels")
        if self.evaluates and isinstance(labels, Tensor):  # in training a loss made of them would be wrong
            padding = whole["input_ids"].shape[1] - tokens
            whole["labels"] = pad(labels.cpu(), (0, padding), value=IGNORED)
        return {**whole, _TOKENS: tokens}

    def _wholes(self, batch: dict[str, Any], states: list[int]) -> list[dict[str, Any]]:
        return super()._wholes({**batch, _UPCOMING: self._upcoming()}, states)

    def _upcoming(self) -> Tensor | None:
        """Return the position_ids of this rank's batch in the next load, if that was read and has documents.

        All ranks of the group tell each other, and plan for it while they work on this load.
        """
        batch = self._newest.batch
        if getattr(self.dl, "end_of_dataloader", False) or not isinstance(batch, Mapping):
            return None
        if not any(name in batch for name in (*CUMULATED, "position_ids")):
            return None
        try:
            positions: Tensor = super()._prepared(batch)["position_ids"]
        except RefusedError:  # that batch's own turn will say so
            return None
        return positions

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        self.rows = len(whole["input_ids"])
        if is_of_preferences(whole):
            return self._on_device(whole)
        self.tokens = whole.pop(_TOKENS)
        part = super()._part(whole)
        self.local = part["input_ids"].shape[1]
        return part

    def _in_turn(self, wholes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Accelerate is told of the end of its loader in the last turn, not when the last load comes.

        In evaluation turns are left out in which no group has a sample of the dataset.
        """
        for upcoming in [whole.pop(_UPCOMING) for whole in wholes]:
            self._plan(upcoming)
        self.last = bool(getattr(self.dl, "end_of_dataloader", False))
        turns = list(range(self._skipped, len(wholes)))
        self._skipped = 0
        if self.evaluates and self.last:
            turns = [turn for turn in turns if self._counts(turn, len(wholes[0]["input_ids"]))]
        for self.turn in turns:
            if self.last:
                self.dl.end_of_dataloader = self.turn == turns[-1]
            yield wholes[self.turn]

    def _counts(self, turn: int, rows: int) -> bool:
        self.turn, self.rows = turn, rows
        return any(self.of_the_dataset(rows))


class _Newest:
    """The batch that a loader of Accelerate's read last, one ahead of the batch that it hands out."""

    def __init__(self, loader: Any) -> None:
        self.batch: Any = None
        inner = getattr(loader, "base_dataloader", None)
        if inner is not None:
            own = inner.__iter__

            def watched() -> Iterator[Any]:
                for self.batch in own():
                    yield self.batch

            inner.__iter__ = watched  # what Accelerate calls, by this name


_UPCOMING = "burst_mcore_upcoming"
"""The key under which a rank's batch brings the positions of the batch after it."""
_TOKENS = "burst_mcore_tokens"
"""The key of a whole batch for its number of tokens before padding."""
_sequences: dict[int, ref[SequenceParallel]] = {}
"""By sequence group, which is never freed, the model that was prepared last: batches are dealt for it."""
_adapters: WeakKeyDictionary[Any, ref[BurstSPDataLoaderAdapter]] = WeakKeyDictionary()
"""Adapters, by the loader of Accelerate that each goes over."""


def deal_for(sequence: SequenceParallel) -> None:
    """Deal the batches of its group's adapters for a model, from their next epoch on."""
    _sequences[id(sequence.group)] = ref(sequence)


def adapter_of(loader: Any) -> BurstSPDataLoaderAdapter | None:
    """Return the adapter that goes over a loader of Accelerate."""
    adapter = None if loader is None else _adapters.get(loader)
    return None if adapter is None else adapter()


def is_of_preferences(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch is one of TRL's preference trainers, whose loss is no sum over labels."""
    return "completion_mask" in batch and "labels" not in batch and "shift_labels" not in batch


def skipping(own: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """accelerate.skip_first_batches, which knows our adapter as well."""

    @wraps(own)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, BurstSPDataLoaderAdapter):
            return dataloader.without(num_batches, own)
        return own(dataloader, num_batches)

    return skip_first_batches


def _take_turns(loader: Any, size: int) -> bool:
    """Have rank j of group g load the batches that the group works on in turn j, in the dataset's order.

    Accelerate gives process p of W batches p, p + W, ...; consecutive processes share a sequence here, and
    would work on batches that lie apart.

    Returns:
        Whether that is possible: not where one process reads for all (a dispatcher, of streamed datasets).
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    group, turn = divmod(rank, size)
    dealers: list[Any] = [getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)]
    dealers.append(getattr(dealers[0], "batch_sampler", None))  # of one that skips batches
    for dealer in dealers:
        if getattr(dealer, "num_processes", None) == world and hasattr(dealer, "process_index"):
            dealer.process_index = turn * (world // size) + group
            return True
    return False
