"""Reusable buffers, pooled by shape; one pass owns a buffer at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.utils import deterministic

from burst_mcore.attention.geometry.rows import Rows, axis, count

SHAPES = 16
"""The number of shapes and dtypes in the pool: the most recently used."""

_Key = tuple[tuple[int, ...], torch.dtype, bool]


class _Pool:
    def __init__(self) -> None:
        self._free: OrderedDict[_Key, list[Tensor]] = OrderedDict()
        self._lock = threading.Lock()  # autograd runs backward in its own threads

    def take(self, key: _Key) -> Tensor | None:
        with self._lock:
            free = self._free.get(key)
            return free.pop() if free else None

    def give(self, key: _Key, tensor: Tensor) -> None:
        with self._lock:
            self._free.setdefault(key, []).append(tensor)
            self._free.move_to_end(key)
            while len(self._free) > SHAPES:
                self._free.popitem(last=False)


_POOL = _Pool()


@dataclass(eq=False)
class Lease:
    """The buffers of one pass, exclusive until the pass ends. After an error they are not reused.

    On the CPU they come from a pool, since fresh memory costs a page fault every 4 KiB. On CUDA torch's
    caching allocator is the pool, by size, stream and captured graph. The rest of the model shares this pool,
    so no buffer is held between calls.
    """

    _leased: dict[int, tuple[_Key, Tensor]] = field(default_factory=dict, init=False)
    """By the tensor's id."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor, filled under torch's deterministic fill setting."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        key = (tuple(shape), dtype, torch.is_inference_mode_enabled())
        tensor = _POOL.take(key)
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype)
        elif torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
        if type(tensor) is Tensor:  # not a tracing mode's tensor
            self._leased[id(tensor)] = key, tensor
        return tensor

    def keep(self, tensor: Tensor) -> Tensor:
        """Remove `tensor` from the lease, to return it to the user."""
        self._leased.pop(id(tensor), None)
        return tensor

    def free(self, block: Sequence[Tensor]) -> None:
        """Return tensors to the pool before the end of the pass."""
        for tensor in block:
            if id(tensor) in self._leased:
                _POOL.give(*self._leased.pop(id(tensor)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for key, tensor in self._leased.values():
                _POOL.give(key, tensor)
        self._leased = {}


def room_like(
    lease: Lease, like: Sequence[Tensor], rows: Rows | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return uninitialised tensors like these, with room for `rows` only (None: all)."""
    room = []
    for tensor in like:
        shape = list(tensor.shape)
        if rows is not None:
            shape[axis(tensor)] = count(rows)
        room.append(lease.empty(shape, dtype or tensor.dtype, tensor.device))
    return tuple(room)
