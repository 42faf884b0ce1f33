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
        seen = CHECKER.clocks[self.stream]
        if any(
            s != self.stream and s not in self.recorded and c > seen.get(s, 0) for s, c in self.last.items()
        ):
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


def pinned(tensor: Tensor) -> Memory | None:
    """Return the memory of a pinned host tensor; None if it is not pinned."""
    if not _PINNED or type(tensor) is not Tensor or tensor.layout != torch.strided:
        return None
    alive, memory = _PINNED.get(tensor.untyped_storage().data_ptr(), (None, None))
    return memory if alive is not None and alive() else None


def _check_reuse(stream: int) -> None:
    seen = CHECKER.clocks[stream]
    for last, recorded, made in FREED.pop(stream, ()):
        late = [s for s, c in last.items() if s != stream and s not in recorded and c > seen.get(s, 0)]
        for each in late:
            CHECKER.found(
                "reuse",
                f"memory made at [{made}] was given back while {CHECKER.names[each]} may use it, and goes to "
                f"[{place()}]",
            )


def access(memory: Memory, values: Tensor, stream: int, count: int, *, write: bool, name: str) -> None:
    """Note that work of a stream reads or writes these values, and report what it does not come after."""
    at, seen, me = _bytes_of(values), CHECKER.clocks[stream], CHECKER.names[stream]
    writer, written = memory.writer[at], memory.written[at]
    if not writer.size:
        return
    for other in np.unique(writer):
        if other not in (NOBODY, stream) and written[writer == other].max() > seen.get(int(other), 0):
            verb, last = "writes" if write else "reads", memory.last_write.get(int(other))
            CHECKER.found(
                "race", f"{name} on {me} {verb} what {CHECKER.names[other]} wrote ({last}) at [{place()}]"
            )
    if write:
        for other, counts in memory.reads.items():
            if other != stream and counts[at].max(initial=0) > seen.get(other, 0):
                CHECKER.found(
                    "race", f"{name} on {me} writes what {CHECKER.names[other]} may read at [{place()}]"
                )
        memory.writer[at], memory.written[at], memory.last_write[stream] = stream, count, name
    else:
        if stream not in memory.reads:
            memory.reads[stream] = np.zeros(memory.size, np.int32)
        memory.reads[stream][at] = count
    memory.last[stream] = count


def _bytes_of(x: Tensor) -> Any:
    """Return an index of the bytes of a strided tensor in its storage."""
    start, size = x.storage_offset() * x.itemsize, x.itemsize
    if x.is_contiguous():
        return slice(start, start + x.numel() * size)
    places = np.zeros(1, np.int64)
    for many, stride in zip(x.size(), x.stride(), strict=True):
        if stride:
            places = (places[:, None] + np.arange(many, dtype=np.int64) * stride).ravel()
    return (start + places[:, None] * size + np.arange(size)).ravel()
