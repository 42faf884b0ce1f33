"""Recording and replay: the results that attention saves in a checkpointed forward for its recomputation.

A checkpointed layer runs twice. Its forward drops its results, and its recomputation, in the middle of
backward, computes them again. `burst_mcore.checkpointing` announces both runs on the thread that makes them.
Each attention call asks for the runs that its thread is in.
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
    """The identity of a call, which tells its recomputation from that of another call."""

    q: tuple[int, ...]
    """[B, S, H, D]."""
    kv_heads: int
    value_dim: int
    dtype: torch.dtype
    layer: str | None
    """The name of the layer that owns the call, if known: see `of_layer`."""
    topology: str
    """The handle of its ring."""
    mask: str
    config: str
    softmax_scale: float | None
    softcap: float | None
    sinks: bool
    return_lse: bool

    def __str__(self) -> str:
        """Return the call in words, for messages."""
        whose = "" if self.layer is None else f" of {self.layer}"
        return f"a call{whose} with q {list(self.q)} {self.dtype}, value_dim {self.value_dim}, {self.mask}"

    def unlike(self, other: CallId) -> str:
        """Return the fields that differ, with the value of this call first."""
        pairs = zip(self._fields, self, other, strict=True)
        return "; ".join(f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs)

    @property
    def bytes(self) -> int:
        """Bytes of the results on this rank: O, and LSE in at least float32."""
        batch, rows, heads, _ = self.q
        return batch * rows * heads * (self.value_dim * self.dtype.itemsize + max(4, self.dtype.itemsize))


@dataclass
class SavedTail:
    """The results of a call for the tail of the sequence, saved in forward."""

    cut: int
    """The global position from which on results are saved."""
    tensors: list[Tensor]
    """Of this rank's rows after the cut: out [B, rows, H, D], lse [B, H, rows]. Under head x ring lse is that
    of the pooled rows and own heads; if the call wants lse at home, lse [B, H, rows] of its own rows follows.
    Empty if nothing is saved."""
    copied: bool
    """Whether the tensors are copies; else they are the results themselves, which others use as well."""


class SavedCalls(Protocol):
    """The forward of one call of a checkpointed function."""

    def share(self, call_id: CallId) -> tuple[float, bool]:
        """Return the share of the sequence to save of this call, and whether that is a limit."""

    def record(self, call_id: CallId, tail: SavedTail) -> None:
        """Take the tail of a call into custody."""


class Replay(Protocol):
    """The recomputation of one call of a checkpointed function."""

    def replay(self, call_id: CallId) -> SavedTail | None:
        """Return the tail that the forward saved of this call, once; None if it is used up.

        Raises:
            RecomputeError: the forward did not make this call.
        """


class Follower(Protocol):
    """The forward or the recomputation of a checkpointed function of which attention keeps nothing."""

    def follow(self, call_id: CallId) -> None:
        """Take notice of a call.

        Raises:
            RecomputeError: this is a recomputation, and the forward did not make this call.
        """


_entered = threading.local()


def recordings() -> tuple[SavedCalls, ...]:
    """Return the forwards that this thread is in, outermost first."""
    entered: tuple[SavedCalls, ...] = getattr(_entered, "recordings", ())
    return entered


def replays() -> tuple[Replay, ...]:
    """Return the recomputations that this thread is in, outermost first."""
    entered: tuple[Replay, ...] = getattr(_entered, "replays", ())
    return entered


def followers() -> tuple[Follower, ...]:
    """Return the runs of functions that keep nothing, which this thread is in, outermost first."""
    entered: tuple[Follower, ...] = getattr(_entered, "followers", ())
    return entered


def in_checkpoint() -> bool:
    """Return whether this thread is in a forward that may keep results, or in its recomputation."""
    return bool(recordings() or replays())


def layer() -> str | None:
    """Return the layer that this thread is in, if it was announced."""
    name: str | None = getattr(_entered, "layer", None)
    return name


@contextlib.contextmanager
def of_layer(name: str) -> Iterator[None]:
    """Announce a layer: its calls are not mistaken for those of another layer, and errors name it."""
    before = layer()
    _entered.layer = name
    try:
        yield
    finally:
        _entered.layer = before


def recording(scope: SavedCalls) -> contextlib.AbstractContextManager[None]:
    """Mark this thread as inside a checkpointed forward."""
    return _inside("recordings", scope)


def replaying(scope: Replay) -> contextlib.AbstractContextManager[None]:
    """Mark this thread as inside a recomputation."""
    return _inside("replays", scope)


def following(scope: Follower) -> contextlib.AbstractContextManager[None]:
    """Mark this thread as inside a forward that keeps nothing, or inside its recomputation."""
    return _inside("followers", scope)


@contextlib.contextmanager
def _inside(runs: str, scope: SavedCalls | Replay | Follower) -> Iterator[None]:
    before = getattr(_entered, runs, ())
    setattr(_entered, runs, (*before, scope))
    try:
        yield
    finally:
        setattr(_entered, runs, before)
