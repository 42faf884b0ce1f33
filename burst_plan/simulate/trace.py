"""A timeline of a pass over the ring, which shows overlap: simulated, or recorded from a run."""

from __future__ import annotations

from dataclasses import dataclass

from burst_mcore.attention.schedule.actions import Channel


@dataclass(frozen=True)
class Event:
    """An interval of work or of a message on a rank. Seconds from the start of the pass."""

    rank: int
    lane: str
    """ "compute", or the link and kind of a message."""
    label: str
    posted: float
    """Time at which the receiver asked for a message; of a compute, its start."""
    started: float
    """Start. For a measured message it is not known, and this is the time of posting."""
    ended: float
    """End. For a measured message, the end of the wait for it."""


def lane(channel: Channel) -> str:
    """Return the lane of a channel's messages."""
    return f"{channel.link} {channel.kind}"
