"""Accelerate's loaders -> loaders of shards: a sequence group works on the batch of each rank in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import BatchSampler

from burst_mcore.rollouts.columns import IGNORED, TREE
from burst_mcore.transformers.data.batches import CUMULATED
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.sequence import SequenceParallel
from burst_mcore.transformers.models.trl import has_fused_head
from burst_mcore.wrap import around


class ShardedBatch(dict[str, Any]):
    """A rank's part of a batch, which says why a training batch has no labels."""

    tokens = 0
    """Tokens of the whole batch, without the padding for the layout."""

    def __missing__(self, name: str) -> Any:
        if name != "labels":
            raise KeyError(name)
        raise RefusedError(
            "labels",
            "a training batch has shift_labels, which were shifted before the sequence was dealt: use the "
            "model's own loss, or make one of logits and shift_labels with burst_mcore.deepspeed.whole_loss",
        )

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a column, as a dict does."""
        return super().pop(name, *default) if default or name in self else self[name]


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
        self.deals = True
        """Whether that was a shard, and not the whole batch."""
        self._skipped = 0
        self._counts_by_mask = False
        """Whether the loss is TRL's, which counts tokens by an attention mask."""
        self._batches: Iterator[dict[str, Any]] | None = None
        self._dealer = _take_turns(dl, self.size)
        dealer = dl if self._dealer is None else self._dealer
        self._batch_size: int | None = getattr(dealer, "batch_size", None)
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
            self._counts_by_mask = any(map(has_fused_head, sequence.model.modules()))
        if self.evaluates:
            _refuse_parts(self.dl, self._dealer)
        _adapters[self.dl] = ref(self)
        if not (self.evaluates and _deals_batches(self._dealer)):
            yield from super().__iter__()
            return
        own = {name: getattr(self._dealer, name) for name in _BY_WHOLE_BATCHES}
        vars(self._dealer).update(_BY_WHOLE_BATCHES)
        try:
            yield from super().__iter__()
        finally:
            vars(self._dealer).update(own)

    def __next__(self) -> dict[str, Any]:
        """Return the next batch of the epoch; Accelerate's adapter is an iterator, too."""
        self._batches = self._batches or iter(self)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise

    @property
    def groups(self) -> int:
        """How many sequence groups there are."""
        return dist.get_world_size() // self.size

    def of_the_dataset(self, group: int, reported: int) -> int:
        """Return how many of the numbers that a group reported of its batch in this turn count.

        Accelerate fills the last load up with samples from the beginning of the dataset, which do not.

        Args:
            reported: one for each row, or one of the batch, or one as often as a full batch has rows.
        """
        count = self._samples(self.turn, group) if self.evaluates and self.last else None
        if count is None or (count and reported != self._batch_size):
            return reported
        return min(count, reported)

    def _samples(self, turn: int, group: int) -> int | None:
        """Return how many samples of the dataset a batch of the last load has; None if that is not known."""
        left, size = _last_load(self.dl, self._dealer, self._batch_size)
        place = turn * self.groups + group
        return None if left is None else min(max(left - place * size, 0), size)

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
        labels, padding = batch.get("labels"), whole["input_ids"].shape[1] - tokens
        if self.evaluates and isinstance(labels, Tensor):  # in training a loss made of them would be wrong
            whole["labels"] = pad(labels.cpu(), (0, padding), value=IGNORED)
        if self._counts_by_mask:
            real = batch.get("attention_mask")
            real = torch.ones_like(batch["input_ids"]) if real is None else real
            whole["attention_mask"] = pad(real.cpu(), (0, padding))
        return {**whole, _TOKENS: tokens}

    def _wholes(self, batch: dict[str, Any], states: list[int]) -> list[dict[str, Any]]:
        if self.evaluates and _is_dispatcher(self.dl) and self.dl.end_of_dataloader:
            return self._dealt_again(batch)
        return super()._wholes({**batch, _UPCOMING: self._upcoming()}, states)

    def _dealt_again(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Return this group's batches of a dispatcher's last load, which had been dealt evenly to the ranks.

        They are those of one process. A group without one in the last turn works on another's.
        """
        every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, batch)
        left, size = _last_load(self.dl, self._dealer, self._batch_size)
        assert left is not None
        rows, group = len(batch["input_ids"]), dist.get_rank() // self.size
        whole = {
            k: torch.cat([each[k] for each in every])[:left] if _has(x, rows) else x for k, x in batch.items()
        }
        batches = [
            {k: x[i : i + size] if _has(x, left) else x for k, x in whole.items()}
            for i in range(0, left, size)
        ]
        turns = -(-len(batches) // self.groups)
        mine = batches[group :: self.groups]
        return [{**each, _UPCOMING: {}} for each in [*mine, batches[0]][:turns]]

    def _upcoming(self) -> dict[str, Any]:
        """Return positions and tree of this rank's batch in the next load, if that was read and has them.

        All ranks of the group tell each other, and plan for it while they work on this load.
        """
        batch, ended = self._newest.batch, getattr(self.dl, "end_of_dataloader", False)
        if isinstance(batch, Mapping) and not ended and {*CUMULATED, "position_ids"} & {*batch}:
            with suppress(RefusedError):  # that batch's own turn will say so
                whole = super()._prepared(batch)
                return {name: whole[name] for name in ("position_ids", TREE) if name in whole}
        return {}

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        self.rows = len(whole["input_ids"])
        self.deals = not is_of_preferences(whole)
        if not self.deals:
            return self._on_device(whole)
        self.tokens = whole.pop(_TOKENS)
        part = ShardedBatch(super()._part(whole))
        part.tokens = self.rows * self.tokens
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
            turns = [t for t in turns if any(self._samples(t, group) != 0 for group in range(self.groups))]
        for self.turn in turns:
            if self.last:
                self.dl.end_of_dataloader = self.turn == turns[-1]
            yield wholes[self.turn]


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
"""The key under which a rank's batch brings the positions and the tree of the batch after it."""
_BY_WHOLE_BATCHES = {"batch_size": None, "drop_last": False, "even_batches": True}
"""How a dealer of Accelerate's fills an evaluation's last load with whole batches, and drops none of it.

Without a size a short batch stays as it is. A batch that the user drops is not in the dealer's own sampler.
"""
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


@around
def skipping(own: Callable[[Any, int], Any], dataloader: Any, num_batches: int = 0) -> Any:
    """accelerate.skip_first_batches, which knows our adapter as well."""
    if isinstance(dataloader, BurstSPDataLoaderAdapter):
        return dataloader.without(num_batches, own)
    return own(dataloader, num_batches)


def _take_turns(loader: Any, size: int) -> Any:
    """Have rank j of group g load the batches that the group works on in turn j, in the dataset's order.

    Accelerate gives process p of W batches p, p + W, ...; consecutive processes share a sequence here, and
    would work on batches that lie apart.

    Returns:
        What deals the batches. None where that is not possible: one process reads for all (a dispatcher, of
        streamed datasets).
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    group, turn = divmod(rank, size)
    names = ("batch_sampler", "sampler", "dataset")
    dealers: list[Any] = [getattr(loader, name, None) for name in names]
    dealers.append(getattr(dealers[0], "batch_sampler", None))  # of one that skips batches
    for dealer in dealers:
        if getattr(dealer, "num_processes", None) == world and hasattr(dealer, "process_index"):
            dealer.process_index = turn * (world // size) + group
            return dealer
    return None


def _is_dispatcher(loader: Any) -> bool:
    from accelerate.data_loader import DataLoaderDispatcher

    return isinstance(loader, DataLoaderDispatcher)


def _deals_batches(dealer: Any) -> bool:
    """Return whether a dealer of Accelerate's gives each process batches, not samples or parts."""
    return isinstance(dealer, BatchSampler) and not getattr(dealer, "split_batches", False)


def _refuse_parts(loader: Any, dealer: Any) -> None:
    """Raise RefusedError where nobody knows with how much Accelerate fills an evaluation's last batch."""
    for name, is_set in {
        "split_batches": any(getattr(x, "split_batches", False) for x in (loader, dealer)),
        "dispatch_batches=False for a streamed dataset": dealer is not None and not _deals_batches(dealer),
    }.items():
        if is_set:
            raise RefusedError("loader", f"evaluation is not served with Accelerate's {name}: leave it out")


def _last_load(loader: Any, dealer: Any, batch_size: int | None) -> tuple[int | None, int]:
    """Return (how much of the dataset is in the last load of all processes, how much is in a full batch).

    In samples; in batches where the sampler does not say how many samples a batch has.
    """
    if _is_dispatcher(loader):
        return loader.remainder, batch_size or 1
    if not _deals_batches(dealer):
        return None, 1
    batches = dealer.batch_sampler
    first = (len(dealer) - 1) * dealer.num_processes
    if type(batches) is not BatchSampler or batch_size is None:
        return len(batches) - first, 1
    samples = min(len(batches.sampler), len(batches) * batch_size)  # type: ignore[arg-type]
    return samples - first * batch_size, batch_size


def _has(x: Any, rows: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows
