"""Recording and replay: the results that attention saves in a checkpointed forward for its recomputation.

A checkpointed layer runs twice. Its forward drops its results, and its recomputation, in the middle of
backward, computes them again. `burst_mcore.checkpointing` announces both runs on the thread that makes them.
Each attention call asks for the runs that its thread is in.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from burst_mcore.attention.shard import Shard


class RecomputeError(RuntimeError):
    """A recomputation does not repeat its forward, so that its gradients would be wrong."""


class CallId(NamedTuple):
    """The identity of a call, which tells its recomputation from that of another call."""

    shard: Shard
    """The shapes of its tensors."""
    layer: str | None
    """The name of the layer that owns the call, if known: see `of_layer`."""
    options: Mapping[str, str]
    """What it is asked for, by name; topology, mask and config by their handles."""
    sinks: bool

    def __str__(self) -> str:
        """Return the call in words, for messages."""
        whose = "" if self.layer is None else f" of {self.layer}"
        shard = self.shard
        shapes = f"{list(shard.q_shape)} {shard.dtype}, value_dim {shard.value_dim}"
        return f"a call{whose} with q {shapes}, {self.options['mask']}"

    def unlike(self, other: CallId) -> str:
        """Return the properties that differ, with the value of this call first."""
        mine, theirs = self._told, other._told
        return "; ".join(f"{x} {mine[x]}, not {theirs[x]}" for x in mine if mine[x] != theirs[x])

    @property
    def _told(self) -> dict[str, object]:
        names = "kv_heads", "value_dim", "latent", "dtype"
        shapes = {"q": self.shard.q_shape, **{name: getattr(self.shard, name) for name in names}}
        return {**shapes, "layer": self.layer, **self.options, "sinks": self.sinks}

    @property
    def bytes(self) -> int:
        """Bytes of the results on this rank: O, and LSE in at least float32."""
        return self.shard.result_bytes


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


class _Entered(threading.local):
    """The runs of checkpointed functions that a thread is in, outermost first."""

    recordings: tuple[SavedCalls, ...] = ()
    replays: tuple[Replay, ...] = ()
    followers: tuple[Follower, ...] = ()
    """Runs of functions that keep nothing."""
    layer: str | None = None
    """The layer, if it was announced."""


entered = _Entered()


def in_checkpoint() -> bool:
    """Return whether this thread is in a forward that may keep results, or in its recomputation."""
    return bool(entered.recordings or entered.replays)


def of_layer(name: str) -> contextlib.AbstractContextManager[None]:
    """Announce a layer: its calls are not mistaken for those of another layer, and errors name it."""
    return _as("layer", name)


def recording(scope: SavedCalls) -> contextlib.AbstractContextManager[None]:
    """Mark this thread as inside a checkpointed forward."""
    return _as("recordings", (*entered.recordings, scope))


def replaying(scope: Replay) -> contextlib.AbstractContextManager[None]:
    """Mark this thread as inside a recomputation."""
    return _as("replays", (*entered.replays, scope))


def following(scope: Follower) -> contextlib.AbstractContextManager[None]:
    """Mark this thread as inside a forward that keeps nothing, or inside its recomputation."""
    return _as("followers", (*entered.followers, scope))


@contextlib.contextmanager
def _as(name: str, value: object) -> Iterator[None]:
    before = getattr(entered, name)
    setattr(entered, name, value)
    try:
        yield
    finally:
        setattr(entered, name, before)
