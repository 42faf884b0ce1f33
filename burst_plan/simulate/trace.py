"""A timeline of a pass over the ring: predicted by a simulator, or recorded from a run; to see overlap."""

from __future__ import annotations

from dataclasses import dataclass

from burst_mcore.attention.schedule.actions import Channel


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
