"""Whether what processes hold grows: slopes over the steps of each process that is old enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

WARM = 200
"""Steps of a process in which its caches fill, and in which it writes to what it shared with its parent."""
ENOUGH = 100
"""Steps after these of which a slope is taken."""
POINTS = 100
"""Steps, evenly spaced, that a slope is taken of: all pairs of them."""


class Held(NamedTuple):
    """What a process holds on to, after a collection of garbage."""

    pid: int
    memory: int
    """Resident, in KiB."""
    threads: int
    descriptors: int


BOUNDS = {"memory": 40960, "threads": 20, "descriptors": 40}
"""Of growth in 1000 steps, of which 50 are faults: a group of gloo that stays has three threads."""


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the median slope of all pairs of points (Theil, Sen): a single jump, however high, is none."""
    few = points[:: max(1, len(points) // POINTS)]
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(few, 2))


def slopes(held: Sequence[tuple[int, Held]]) -> dict[int, dict[str, float]]:
    """Return, by process and by what it holds, the growth in 1000 steps; `held` is by step."""
    by_process: dict[int, list[tuple[int, Held]]] = defaultdict(list)
    for step, each in held:
        by_process[each.pid].append((step, each))
    return {
        pid: {
            name: 1000 * slope([(step, getattr(each, name)) for step, each in points[WARM:]])
            for name in BOUNDS
        }
        for pid, points in by_process.items()
        if len(points) >= WARM + ENOUGH
    }


def growths(held: Sequence[tuple[int, Held]]) -> list[str]:
    """Return a sentence for each process that holds more and more."""
    return [
        f"process {pid} holds more and more {name}: {growth:.0f} in 1000 steps, more than {BOUNDS[name]}"
        for pid, of_process in slopes(held).items()
        for name, growth in of_process.items()
        if growth > BOUNDS[name]
    ]
