"""A timeline of a pass over the ring: predicted by the cost model, or recorded from a run; to see overlap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from burst_mcore.attention.schedule.actions import Action, Channel


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


def lane(channel: Channel) -> str:
    """Return the lane of a channel's messages."""
    return f"{channel.link} {channel.kind}"


class Recorder(Protocol):
    """The place where the executor tells when actions begin and end: see burst_bench/trace.py."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Take the time of an action, and of the messages that it waits for."""

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Note when the messages of a hop started."""


RECORDERS: list[Recorder] = []
"""Recorders of this process, the innermost last: backward runs in another thread, beyond a context."""
