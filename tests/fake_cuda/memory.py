"""Memory: which bytes each piece of work reads and writes, and what the caching allocator may do with them.

torch's allocator gives freed memory at once to the next allocation on the stream that the memory was made on.
Only work of that stream is ordered before what the new owner does. So memory that another stream uses must be
free of that use when it is given back: its stream has waited, or `record_stream` has told the allocator.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .clocks import CHECKER, Clock, place

NOBODY = -1


class Memory:
    """One allocation: of a device, or of pinned host memory."""

    def __init__(self, storage: Any, rank: int, stream: int, *, of_host: bool = False) -> None:
        self.storage = None if of_host else storage  # a host tensor's life is its owner's
        self.size, self.rank, self.stream, self.of_host = storage.nbytes(), rank, stream, of_host
        self.made = place()
        self.writer = np.full(self.size, NOBODY, np.int16)
        self.written = np.zeros(self.size, np.int32)
        self.reads: dict[int, np.ndarray] = {}
        self.last: Clock = {}
        self.recorded: set[int] = set()
        self.last_write: dict[int, str] = {}
        if not of_host:
            _check_reuse(stream)
            CHECKER.bytes[rank] += self.size
            CHECKER.peak[rank] = max(CHECKER.peak[rank], CHECKER.bytes[rank])

    def __del__(self) -> None:
        if self.of_host:
            return
        CHECKER.bytes[self.rank] -= self.size
        if set(CHECKER.late(self.stream, self.last)) - self.recorded:
            FREED[self.stream].append((self.last, self.recorded, self.made))


_BY_ADDRESS: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
FREED: dict[int, list[tuple[Clock, set[int], str]]] = defaultdict(list)
"""By stream of the allocator: memory that was given back while others might still use it."""
_PINNED: dict[int, tuple[weakref.ref[Any], Memory]] = {}


def memory_of(tensor: Tensor, rank: int, stream: int) -> Memory | None:
    """Return the memory of a device tensor, given the host tensor that has its values; new if unknown."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if not address:
        return None
    memory = _BY_ADDRESS.get(address)
    if memory is None:
        memory = _BY_ADDRESS[address] = Memory(storage, rank, stream)
    return memory


def pin(tensor: Tensor) -> Tensor:
    """Note that a host tensor is in pinned memory."""
    storage = tensor.untyped_storage()
    for address, (alive, _) in list(_PINNED.items()):
        if alive() is None:
            _PINNED.pop(address, None)
    if storage.data_ptr():
        _PINNED[storage.data_ptr()] = _Alive(storage), Memory(storage, NOBODY, NOBODY, of_host=True)  # type: ignore[assignment]
    return tensor


class _Alive:
    """A reference to a storage that does not keep it alive."""

    def __init__(self, storage: Any) -> None:
        self._weak = torch.multiprocessing.reductions.StorageWeakRef(storage)

    def __call__(self) -> bool | None:
        return None if self._weak.expired() else True


def any_pinned() -> bool:
    return bool(_PINNED)


def pinned(tensor: Tensor) -> Memory | None:
    """Return the memory of a pinned host tensor; None if it is not pinned."""
    if not _PINNED or type(tensor) is not Tensor or tensor.layout != torch.strided:
        return None
    alive, memory = _PINNED.get(tensor.untyped_storage().data_ptr(), (None, None))
    return memory if alive is not None and alive() else None


def _check_reuse(stream: int) -> None:
    for last, recorded, made in FREED.pop(stream, ()):
        for each in set(CHECKER.late(stream, last)) - recorded:
            CHECKER.found(
                "reuse",
                f"memory made at [{made}] was given back while {CHECKER.names[each]} may use it, and goes to "
                f"[{place()}]",
            )


def access(memory: Memory, values: Tensor, stream: int, count: int, *, write: bool, name: str) -> None:
    """Note that work of a stream reads or writes these values, and report what it does not come after."""
    if not values.numel():
        return
    me, late = CHECKER.names[stream], CHECKER.late(stream, memory.last)
    for other in late:  # few, or none: only then does it matter which bytes are the same
        known, last = CHECKER.knows(stream, other), memory.last_write.get(other)
        if (
            last is not None
            and _of(memory.written, values)[_of(memory.writer, values) == other].max(initial=0) > known
        ):
            verb = "writes" if write else "reads"
            CHECKER.found(
                "race", f"{name} on {me} {verb} what {CHECKER.names[other]} wrote ({last}) at [{place()}]"
            )
        if write and other in memory.reads and _of(memory.reads[other], values).max() > known:
            CHECKER.found(
                "race", f"{name} on {me} writes what {CHECKER.names[other]} may read at [{place()}]"
            )
    if write:
        _of(memory.writer, values)[...], _of(memory.written, values)[...] = stream, count
        memory.last_write[stream] = name
    else:
        if stream not in memory.reads:
            memory.reads[stream] = np.zeros(memory.size, np.int32)
        _of(memory.reads[stream], values)[...] = count
    memory.last[stream] = count


def _of(numbers: np.ndarray, x: Tensor) -> np.ndarray:
    """Return the numbers of the bytes of a strided tensor, of those of its storage's bytes."""
    size = x.itemsize
    if x.is_contiguous():
        return numbers[x.storage_offset() * size :][: x.numel() * size]
    dimensions = [(many, by * size) for many, by in zip(x.shape, x.stride(), strict=True) if by]
    shape, strides = zip(*dimensions, (size, 1), strict=True)
    start = x.storage_offset() * size * numbers.itemsize
    return np.ndarray(shape, numbers.dtype, numbers, start, [by * numbers.itemsize for by in strides])
