"""CUDA tensors over gloo, which sends host memory: by way of pinned buffers. For tests on one GPU, not speed.

NCCL wants a GPU for each rank; over gloo several ranks can share one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Arrival:
    """A message received into the host that goes on to the device when it is waited for."""

    def __init__(self, work: Work, host: Tensor, device: Tensor) -> None:
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        """Wait for the message, and copy it to where it belongs."""
        self._work.wait()
        self._device.copy_(self._host)  # it blocks: the host buffer may go


def on_host(x: Tensor, *, filled: bool) -> Tensor:
    """Host memory like x, pinned if there is a GPU; `filled` with its values, as of the current stream."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x) if filled else host
