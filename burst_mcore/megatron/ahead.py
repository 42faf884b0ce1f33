"""Megatron's batches of packed documents, planned one batch ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.data import DataLoader

from burst_mcore.attention.prepare import one_ahead, prepare
from burst_mcore.megatron.packed import packing_of


def planned_ahead(batches: Iterable[dict[str, Any]], ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the same batches; the next packed batch is read and planned before each is yielded.

    For tensor-parallel ranks that read data, the first of each group; other ranks plan when a batch arrives.

    Args:
        batches: of Megatron's datasets, with `tokens` [B, S] and, if packed, `cu_seqlens` (and perhaps
            `cu_seqlens_padded`) [B, entries] or [entries].
        ranks: context-parallel ranks.
    """
    return _ahead(iter(batches), ranks)  # iter at once: a loader's workers start when Megatron expects it


def _ahead(rest: Iterator[dict[str, Any]], ranks: int) -> Iterator[dict[str, Any]]:
    for first in rest:
        every = (_planned(batch, ranks) for batch in itertools.chain([first], rest))
        yield from one_ahead(every) if _is_packed(first) else [first]


def _is_packed(batch: Any) -> bool:
    ends, tokens = (batch.get(x) if isinstance(batch, dict) else None for x in ("cu_seqlens", "tokens"))
    return isinstance(ends, Tensor) and isinstance(tokens, Tensor) and tokens.dim() == 2


def _planned(batch: dict[str, Any], ranks: int) -> dict[str, Any]:
    if not _is_packed(batch):
        return batch
    rows, length = batch["tokens"].shape
    ends, slots = (_merged(batch.get(name), length) for name in ("cu_seqlens", "cu_seqlens_padded"))
    with suppress(ValueError):  # the forward raises it
        packing = packing_of(ends, slots, rows * length, ranks)
        prepare(packing.documents, tokens=rows * length, ranks=ranks, layout=packing.layout)
    return batch


def _merged(ends: Tensor | None, length: int) -> Tensor | None:
    """cu_seqlens of all samples in a row, without padding to one length."""
    if ends is None:
        return None
    rows = [row.unique() + index * length for index, row in enumerate(ends.reshape(-1, ends.shape[-1]).cpu())]
    return torch.cat([rows[0], *(row[1:] for row in rows[1:])])


class Ahead:
    """A data loader of Megatron's whose batches are planned ahead."""

    def __init__(self, loader: Any, ranks: int) -> None:
        self._loader, self._ranks = loader, ranks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return planned_ahead(self._loader, self._ranks)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def read_ahead(loader: Any) -> Any:
    """Return the loader, its batches planned ahead if it is Megatron's own and sequences are shared by ranks.

    Loaders that a script made (--dataloader-type external) may be iterators, or have a state to be saved.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    return Ahead(loader, ranks) if isinstance(loader, DataLoader) and ranks > 1 else loader
