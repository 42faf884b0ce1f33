"""The agreement of the ranks in a forward, kept for its backward, with no tensor that the host must read.

A compiled graph passes nothing but tensors from a forward to its backward. So the forward returns a tensor
of its own device, which stands for the record. The host finds the record by the memory of that tensor. The
tensor holds the same values, which are read only where a hook has moved it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class CallRecord(NamedTuple):
    """The properties of a forward on which the ranks agreed, for backward and recomputation."""

    number: int
    """The number of the call."""
    cut: int
    """Global position from which on the results are saved, or were."""
    lengths: tuple[int, ...]
    """The tokens of each rank."""


MANY = 1024
"""Records beyond which those of tensors that are gone are dropped."""
_BY_ADDRESS: dict[int, tuple[StorageWeakRef, CallRecord]] = {}


def pack(record: CallRecord, device: torch.device) -> Tensor:
    """Return a new int64 tensor on the device that stands for a record. The host waits for no copy."""
    values = [record.number, record.cut, *record.lengths]
    if device.type == "cuda":
        packed = torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
    else:
        packed = torch.tensor(values, device=device)
    remember(packed, record)
    return packed


def remember(packed: Tensor, record: CallRecord) -> None:
    """Let `packed` stand for a record, until its memory is freed."""
    if len(_BY_ADDRESS) >= MANY:
        for address, (storage, _) in list(_BY_ADDRESS.items()):
            if storage.expired():
                _BY_ADDRESS.pop(address, None)
    _BY_ADDRESS[packed.data_ptr()] = StorageWeakRef(packed.untyped_storage()), record


def known(packed: Tensor) -> CallRecord | None:
    """Return the record that a tensor stands for, without a look at its values; None if it is not known."""
    if not has_memory(packed):
        return None
    storage, record = _BY_ADDRESS.get(packed.data_ptr(), (None, None))
    return None if storage is not None and storage.expired() else record


def unpack(packed: Tensor) -> CallRecord:
    """Return the record that a tensor stands for; its values are read if it is a copy."""
    record = known(packed)
    if record is None:
        number, cut, *lengths = packed.tolist()
        record = CallRecord(number, cut, tuple(lengths))
    return record


def has_memory(x: Tensor) -> bool:
    """Return whether x is no tensor of a tracing mode."""
    return type(x) is Tensor and not torch._is_functional_tensor(x) and x.device.type != "meta"
