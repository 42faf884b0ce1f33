"""The place where the executor tells when actions begin and end, for timelines of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from burst_mcore.attention.schedule.actions import Action, Channel


class Recorder(Protocol):
    """The place where the executor tells when actions begin and end: see burst_bench/trace.py."""

    def span(self, action: Action) -> AbstractContextManager[None]:
        """Take the time of an action, and of the messages that it waits for."""

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Note when the messages of a hop started."""


RECORDERS: list[Recorder] = []
"""Recorders of this process, the innermost last: backward runs in another thread, beyond a context."""
