"""What attention keeps for its own recomputation, and what it is given back there.

A checkpointed layer runs twice: its forward drops what it computed, and its recomputation, in the middle of
backward, computes that again. Both runs are announced on the thread that makes them, and each attention call
asks those that it finds itself in. Who announces them is `burst_mcore.checkpointing`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RecomputeError(RuntimeError):
    """A recomputation does not repeat its forward, so that its gradients would be wrong."""


class CallId(NamedTuple):
    """What a call is, for its recomputation to be told from another call."""

    q: tuple[int, ...]
    """[B, S, H, D]."""
    kv_heads: int
    value_dim: int
    dtype: torch.dtype
    layer: str | None
    """The name of the layer that owns the call, where it is known: see `of_layer`."""
    topology: str
    """The handle of its ring."""
    mask: str
    config: str
    softmax_scale: float | None
    softcap: float | None
    sinks: bool
    return_lse: bool

    def __str__(self) -> str:
        """For messages."""
        whose = "" if self.layer is None else f" of {self.layer}"
        return f"a call{whose} with q {list(self.q)} {self.dtype}, value_dim {self.value_dim}, {self.mask}"

    def unlike(self, other: CallId) -> str:
        """What differs, this one's first."""
        pairs = zip(self._fields, self, other, strict=True)
        return "; ".join(f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs)

    @property
    def bytes(self) -> int:
        """Of its results on this rank: O, and LSE in at least float32."""
        batch, rows, heads, _ = self.q
        return batch * rows * heads * (self.value_dim * self.dtype.itemsize + max(4, self.dtype.itemsize))


@dataclass
class SavedTail:
    """The end of the sequence that a call has kept of its results."""

    cut: int
    """The global position from which on results are saved."""
    tensors: list[Tensor]
    """Of this rank's rows behind the cut: out [B, rows, H, D], lse [B, H, rows]; under head x ring lse of the
    pooled rows and own heads, and, if the call wants it at home, lse [B, H, rows] of its own rows as well.
    None at all: nothing is kept."""
    copied: bool
    """Into memory of their own; else they are the results themselves, which others use as well."""


class Recording(Protocol):
    """The forward of one call of a checkpointed function."""

    def share(self, call_id: CallId) -> tuple[float, bool]:
        """Which share of the sequence to keep of this call, and whether no more than that."""
        ...

    def record(self, call_id: CallId, tail: SavedTail) -> None:
        """Hold this."""
        ...


class Replay(Protocol):
    """The recomputation of one call of a checkpointed function."""

    def replay(self, call_id: CallId) -> SavedTail | None:
        """What the forward has kept of this call, once; None if it is used up.

        Raises:
            RecomputeError: the forward did not make this call.
        """
        ...


_entered = threading.local()


def recordings() -> tuple[Recording, ...]:
    """The forwards that this thread is in, outermost first."""
    found: tuple[Recording, ...] = getattr(_entered, "recordings", ())
    return found


def replays() -> tuple[Replay, ...]:
    """The recomputations that this thread is in, outermost first."""
    found: tuple[Replay, ...] = getattr(_entered, "replays", ())
    return found


def in_checkpoint() -> bool:
    """Whether this thread is in either."""
    return bool(recordings() or replays())


def layer() -> str | None:
    """The layer that this thread is in, where somebody said so."""
    found: str | None = getattr(_entered, "layer", None)
    return found


@contextlib.contextmanager
def of_layer(name: str) -> Iterator[None]:
    """Calls in here are this layer's: its recomputation is not mistaken for another's, and errors name it."""
    before = layer()
    _entered.layer = name
    try:
        yield
    finally:
        _entered.layer = before


@contextlib.contextmanager
def recording(scope: Recording) -> Iterator[None]:
    """Mark this thread as inside a checkpointed forward."""
    before = recordings()
    _entered.recordings = (*before, scope)
    try:
        yield
    finally:
        _entered.recordings = before


@contextlib.contextmanager
def replaying(scope: Replay) -> Iterator[None]:
    """Be in this recomputation."""
    before = replays()
    _entered.replays = (*before, scope)
    try:
        yield
    finally:
        _entered.replays = before
