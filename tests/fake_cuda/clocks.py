"""Vector clocks: what every stream, and every rank's host, knows to have happened before its next work.

A stream's clock counts its own work, and holds the count of each other stream that it has waited for. Work a
happened before work b if the clock of b's stream had reached a's count when b was launched.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

Clock = dict[int, int]
"""By stream: how much of its work has happened."""


class Checker:
    """The clocks of all streams of all ranks, and the findings."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.names: list[str] = []
        self.clocks: list[Clock] = []
        """By stream: what it knows of this case."""
        self.before: Clock = {}
        """What all know of earlier cases."""
        self.findings: Counter[str] = Counter()
        self.syncs: dict[int, Counter[str]] = defaultdict(Counter)
        """By rank: where its host waited for the device."""
        self.launches: dict[int, Counter[str]] = defaultdict(Counter)
        """By rank and name."""
        self.bytes: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        """By rank: bytes of device memory now, and at most."""

    def stream(self, name: str) -> int:
        """Return a new stream."""
        with self.lock:
            self.names.append(name)
            self.clocks.append({})
            return len(self.names) - 1

    def tick(self, stream: int) -> int:
        """Count one more piece of work of a stream."""
        count = self.clocks[stream][stream] = self.knows(stream, stream) + 1
        return count

    def knows(self, stream: int, other: int) -> int:
        """Return how much of another stream's work has happened before a stream's next work."""
        return max(self.clocks[stream].get(other, 0), self.before.get(other, 0))

    def late(self, stream: int, work: Clock) -> list[int]:
        """Return the other streams whose work a stream does not come after."""
        return [s for s, count in work.items() if s != stream and count > self.knows(stream, s)]

    def join(self, stream: int, *others: Clock) -> None:
        """Let all that is in these clocks happen before the next work of a stream."""
        joined(self.clocks[stream], *others)

    def snapshot(self, stream: int) -> Clock:
        """Return the clock of a stream as it is now."""
        return dict(self.clocks[stream])

    def found(self, kind: str, text: str) -> None:
        """Report something."""
        with self.lock:
            self.findings[f"{kind}: {text}"] += 1

    def begin(self) -> None:
        """Begin a new case: no findings, no counts, and all that was launched before has happened."""
        with self.lock:
            joined(self.before, *self.clocks)
            self.clocks = [{} for _ in self.clocks]
            for each in (self.findings, self.syncs, self.launches):
                each.clear()
            self.peak = Counter(self.bytes)


def joined(clock: Clock, *others: Clock) -> Clock:
    """Raise a clock to what these others know."""
    for other in others:
        for stream, count in other.items():
            if count > clock.get(stream, 0):
                clock[stream] = count
    return clock


def place() -> str:
    """Return the lines of the package, or else of the test, that are under way, innermost first."""
    frame: Any = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        name = frame.f_code.co_filename
        if "/burst_mcore/" in name:
            lines.append(f"{name.rsplit('/burst_mcore/', 1)[1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "the test"


def names(streams: Iterable[int]) -> str:
    """Return the names of streams."""
    return ", ".join(CHECKER.names[stream] for stream in streams)


CHECKER = Checker()
"""Of this process: memory and streams outlive a case."""
