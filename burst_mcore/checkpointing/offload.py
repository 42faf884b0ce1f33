"""Saved results until backward: on their device, or in pinned host memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from burst_mcore.attention.replay import RecomputeError, SavedSuffix


class OnDevice:
    """Saved results on their device."""

    def __init__(self, suffix: SavedSuffix) -> None:
        self._suffix = suffix
        self._versions = _versions(suffix.tensors)

    def take(self) -> SavedSuffix:
        """Return the saved tensors. Raises RecomputeError if one was modified in place."""
        if _versions(self._suffix.tensors) != self._versions:
            advice = "do not write to it: backward reads it"
            raise RecomputeError(f"the output of burst_attention was modified in place: {advice}")
        return self._suffix


class OffloadedResults:
    """A call's results in pinned host memory, prefetched when backward takes the next call's results."""

    _of_thread = threading.local()
    """`last`: the results that a thread saved last, which backward takes first."""

    def __init__(self, suffix: SavedSuffix) -> None:
        self._cut, self._before = suffix.cut, getattr(self._of_thread, "last", None)
        self._there = [(_sent(x if suffix.copied else x.clone()), x.device) for x in suffix.tensors]
        self._here: list[Tensor] | None = None
        self._of_thread.last = weakref.ref(self)

    def fetch(self) -> None:
        """Start the copies back to the device."""
        if self._here is None:
            self._here = [_fetched(x, device) for x, device in self._there]

    def take(self) -> SavedSuffix:
        self.fetch()
        assert self._here is not None
        for x in self._here:
            _await(x)
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return SavedSuffix(self._cut, self._here, copied=True)


SavedResults = OnDevice | OffloadedResults
"""Saved results of a suffix; `take` is called once."""


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [x._version for x in tensors if not x.is_inference()]


def _sent(x: Tensor) -> Tensor:
    """Start the copy of a tensor to host memory; return the copy."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return host


def _fetched(host: Tensor, device: torch.device) -> Tensor:
    with torch.cuda.stream(_stream(device)):  # after the copy to the host, which is on the same stream
        return host.to(device, non_blocking=True)


def _await(x: Tensor) -> None:
    """Let the current stream wait for the copy of a tensor."""
    current = torch.cuda.current_stream(x.device)
    current.wait_stream(_stream(x.device))
    x.record_stream(current)


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
