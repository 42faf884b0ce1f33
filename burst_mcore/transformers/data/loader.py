"""Loaders of whole sequences -> loaders of shards; a whole batch that every rank has -> a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.agreement.agreement import agreement_over
from burst_mcore.agreement.claims import Claim
from burst_mcore.layout import Layout
from burst_mcore.transformers.data.batches import READ, digest_of_batch, of_tokens, prepared, sharded
from burst_mcore.transformers.errors import UnsupportedError

END = -1
"""The state of a rank without a batch; states of batches are digests, which are not negative."""


class ShardedLoader:
    """Iterates over a loader of whole sequences and yields this rank's part of each batch.

    Every rank of the CP group must load the same batches (`own=False`); that is checked, batch by
    batch. Or each loads its own (`own=True`, the way of UlyssesSPDataLoaderAdapter, for loaders that shard
    samples over all ranks): then they are gathered, and all ranks work on each of them in turn.

    Args:
        whole: whether batches stay as they are, for a model that shards them itself.
        max_positions, types: as `prepared` has them.

    Yields: input_ids, position_ids, shift_labels [rows, local tokens], on `device`, and what else came.

    Raises:
        UnsupportedError: a batch is not legal or differs; ranks without an error get an OthersError.
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
        max_positions: int | None = None,
        types: str | None = None,
    ) -> None:
        self.loader, self.group, self.own, self.device = loader, group, own, device
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.layout, self.whole = Layout.of(layout), whole
        self._prepare = partial(
            prepared, multiple=self.layout.divisor(self.size), max_positions=max_positions, types=types
        )

    def __len__(self) -> int:
        return len(self.loader) * (self.size if self.own else 1)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, or of its sampler, for another order of samples."""
        loader: Any = self.loader
        owner: Any = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's part of each batch."""
        loads = iter(self.loader)
        while batches := self.agreed(lambda: next(loads)):
            for batch in batches:
                yield self._part(batch)

    def agreed(self, load: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return the whole batches that the ranks load here; none where loads have ended. Collective."""
        batch, state, agreement = None, END, agreement_over(self.group)
        with agreement.refusing(), contextlib.suppress(StopIteration):
            batch = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in _mapping(load()).items()}
            batch = batch if self.whole else self._prepare(batch)
            state = digest_of_batch(of_tokens(batch) if self.whole else batch)
        states = [*agreement.meet(Claim({}, (state,))).lengths]
        if END in states:
            if set(states) != {END}:
                ranks = [rank for rank, state in enumerate(states) if state == END]
                raise UnsupportedError("loader", f"it ended on ranks {ranks} of the CP group before others")
            return []
        assert batch is not None
        if self.own and self.group is not None:
            batches: list[dict[str, Any]] = [{} for _ in states]
            dist.all_gather_object(batches, batch, group=self.group)
            return batches
        if len(set(states)) > 1:
            text = "ranks of a CP group were given different whole batches"
            sampler = "DistributedSampler(num_replicas=world // SP, rank=rank // SP), one seed"
            raise UnsupportedError("batch", f"{text}: give all the same ({sampler}), or pass own=True")
        return [batch]

    def _part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole batch, on the device."""
        if not self.whole:
            batch = sharded(batch, rank=self.rank, size=self.size, layout=self.layout)
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}


def shard_of_whole_batch(
    arguments: Mapping[str, Any], sharding: Mapping[str, Any], group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a forward's arguments with this rank's shard of their whole batch, and that batch. Collective.

    Args:
        arguments: input_ids, labels and attention_mask [rows, tokens], the same on all ranks of the group;
            lists of numbers are read as well; what else is no tensor stays.
        sharding: how batches are sharded: keyword arguments of `ShardedLoader`.

    Raises:
        UnsupportedError: a batch is not legal or differs; ranks without an error get an OthersError.
    """
    batch = {name: x for name, x in arguments.items() if isinstance(x, Tensor) or name in READ}
    ids = arguments.get("input_ids")
    device = getattr(arguments.get("inputs_embeds") if ids is None else ids, "device", "cpu")
    sharder = ShardedLoader((), group=group, device=device, **sharding)
    (result,) = sharder.agreed(lambda: batch)
    return {**{n: x for n, x in arguments.items() if n not in batch}, **sharder._part(result)}, result


def _mapping(batch: Any) -> Mapping[str, Any]:
    """Return a batch as a mapping; tokens alone are input_ids."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, list | tuple) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    raise UnsupportedError("batch", f"give a dict with input_ids or a tensor, got {type(batch).__name__}")
