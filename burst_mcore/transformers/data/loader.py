"""Loaders of whole sequences -> loaders of shards; a whole batch that every rank has -> a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.agreement.agreement import Claim
from burst_mcore.agreement.groups import agreement_over
from burst_mcore.layout import Layout
from burst_mcore.transformers.agreement import refused_by_others
from burst_mcore.transformers.data.batches import READ, apart, digest_of_batch, prepared, sharded
from burst_mcore.transformers.errors import RefusedError

END = -1
"""The state of a rank without a batch; states of batches are digests, which are not negative."""


class ShardedLoader:
    """Iterates over a loader of whole sequences and yields this rank's part of each batch.

    Every rank of the CP group must load the same batches (`own=False`); that is checked, batch by
    batch. Or each loads its own (`own=True`, the way of UlyssesSPDataLoaderAdapter, for loaders that shard
    samples over all ranks): then they are gathered, and all ranks work on each of them in turn.

    Args:
        whole: whether batches stay as they are, for a model that shards them itself.
        padding: as `prepared` has it.

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
        layout: Layout | str = "zigzag",
        whole: bool = False,
        **padding: Any,
    ) -> None:
        self.loader, self.group, self.own, self.device = loader, group, own, device
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
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
        while wholes := self.agreed(lambda: next(batches)):
            for whole in wholes:
                yield self._part(whole)

    def agreed(self, load: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return the whole batches that the ranks load here; none where loads have ended. Collective."""
        batch, state, agreement = None, END, agreement_over(self.group)
        with agreement.refusing(), contextlib.suppress(StopIteration):
            here = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in _mapping(load()).items()}
            batch = here if self.whole else prepared(here, **self._how)
            state = digest_of_batch(apart(batch)[0] if self.whole else batch)
        with refused_by_others():
            states = [*agreement.meet(Claim({}, (state,))).lengths]
        if END in states:
            if set(states) != {END}:
                ended = [rank for rank, state in enumerate(states) if state == END]
                raise RefusedError("loader", f"it ended on ranks {ended} of the CP group before others")
            return []
        assert batch is not None
        return self._wholes(batch, states)

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, on the device."""
        place: dict[str, Any] = {"rank": self.rank, "size": self.size, "layout": self.layout}
        part = whole if self.whole else sharded(whole, **place)
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in part.items()}

    def _wholes(self, batch: dict[str, Any], states: list[int]) -> list[dict[str, Any]]:
        if self.own and self.group is not None:
            every: list[dict[str, Any]] = [{} for _ in range(self.size)]
            dist.all_gather_object(every, batch, group=self.group)
            return every
        if len(set(states)) > 1:
            text = "ranks of a CP group were given different whole batches"
            sampler = "DistributedSampler(num_replicas=world // SP, rank=rank // SP), one seed"
            raise RefusedError("batch", f"{text}: give all the same ({sampler}), or pass own=True")
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
    batch = {name: x for name, x in arguments.items() if isinstance(x, Tensor) or name in READ}
    ids = arguments.get("input_ids")
    device = getattr(arguments.get("inputs_embeds") if ids is None else ids, "device", "cpu")
    sharder = ShardedLoader((), group=group, device=device, **sharding)
    (whole,) = sharder.agreed(lambda: batch)
    return {**{n: x for n, x in arguments.items() if n not in batch}, **sharder._part(whole)}, whole


def _mapping(batch: Any) -> Mapping[str, Any]:
    """Return a batch as a mapping; tokens alone are input_ids."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    raise RefusedError("batch", f"it must be a dict with input_ids, or a tensor; got {type(batch).__name__}")
