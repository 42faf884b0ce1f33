"""A timeline of a pass over the ring: predicted by the cost model, or recorded from a run; to see overlap."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from burst_mcore.attention.schedule.actions import (
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Pack,
    Recv,
    Unpack,
    Wait,
)


@dataclass(frozen=True)
class Event:
    """Something that took time on a rank. Seconds from the start of the pass."""

    rank: int
    lane: str
    """ "compute", or the link and kind of a message."""
    label: str
    posted: float
    """Time at which the receiver asked for a message; of a compute, its start."""
    started: float
    """Start. Of a measured message it is not known: its posting stands here."""
    ended: float
    """End. Of a measured message, the end of the wait for it."""


@dataclass
class Recording:
    """A recorder of the times of one rank's actions; if `on_cuda`, of times on the current stream.

    A message's end is the time when its wait was over: it arrived then, or earlier.
    """

    rank: int = 0
    on_cuda: bool = False
    events: list[Event] = field(default_factory=list)
    _marks: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    _under_way: dict[Channel, list[tuple[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin = self._now()

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Take the time of an action, and of the messages that it waits for."""
        before = self._now()
        yield
        after = self._now()
        if isinstance(action, Wait):
            for label, posted in self._under_way.pop(action.channel):
                self._marks.append((lane(action.channel), label, posted, after))
        elif isinstance(action, (Compute, Accumulate, Add, Pack, Unpack)):
            self._marks.append(("compute", str(action), before, after))

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Note when the messages of a hop started."""
        now = self._now()
        started = [(str(action), now) for action in actions if isinstance(action, Recv)]
        self._under_way.setdefault(channel, []).extend(started)

    def finish(self) -> None:
        """Turn the marks into events; on CUDA this waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        for where, label, start, end in self._marks:
            started = self._since(start)
            self.events.append(Event(self.rank, where, label, started, started, self._since(end)))
        self._marks = []

    def _now(self) -> Any:
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _since(self, mark: Any) -> float:
        seconds: float = (
            mark - self._begin if isinstance(mark, float) else self._begin.elapsed_time(mark) / 1e3
        )
        return seconds


def lane(channel: Channel) -> str:
    """Return the lane of a channel's messages."""
    return f"{channel.link} {channel.kind}"


_SHARED: list[Recording] = []
"""Recordings of this process: backward runs in another thread, where the context does not reach."""


def recorder() -> Recording | None:
    """Return the recorder of this process, that of the innermost `record`, if there is one."""
    return _SHARED[-1] if _SHARED else None


@contextlib.contextmanager
def record(rank: int = 0, *, on_cuda: bool = False) -> Iterator[list[Event]]:
    """Record the passes that run inside; the events are there when it ends.

    Every rank records its own: gather the lists and give them to `burst_plan.explain.chrome_trace`.

    Args:
        rank: the rank that the events are marked with.
        on_cuda: whether tensors are on CUDA. Times are then taken on the current stream, and the end of the
            context waits for the device.
    """
    recording = Recording(rank, on_cuda)
    _SHARED.append(recording)
    try:
        yield recording.events
    finally:
        _SHARED.remove(recording)
        recording.finish()
