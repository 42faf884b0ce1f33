"""Whether what processes hold grows: slopes over the steps of each process that is old enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

WARM = 200
"""Steps of a process in which libraries load, and in which it writes to what it shared with its parent."""
ENOUGH = 100
"""Steps after these of which a slope is taken."""
POINTS = 100
"""Steps, evenly spaced, that a slope is taken of: all pairs of them."""


class Held(NamedTuple):
    """What a process holds on to, after a collection of garbage, and with empty caches."""

    pid: int
    memory: int
    """Resident, in KiB."""
    threads: int
    descriptors: int


BOUNDS = {"memory": 30720, "threads": 60, "descriptors": 80}
"""Of growth in 1000 steps, of which 50 are faults and 35 trainings, which make groups of their own.

A group of gloo that stays has three threads: 105 for one of each training. torch itself keeps groups of a few
trainings: twice in 500 steps, 6 threads.
"""


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Return the median slope of all pairs of points (Theil, Sen): a single jump, however high, is none."""
    few = points[:: max(1, len(points) // POINTS)]
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(few, 2))


def slopes(held: Sequence[tuple[int, Held]]) -> dict[int, dict[str, float]]:
    """Return, by process and by what it holds, the growth in 1000 steps; `held` is by step."""
    by_process: dict[int, list[tuple[int, Held]]] = defaultdict(list)
    for step, each in held:
        by_process[each.pid].append((step, each))
    warm = {
        pid: [(at, x) for at, x in points if at >= points[0][0] + WARM] for pid, points in by_process.items()
    }
    return {
        pid: {name: 1000 * slope([(step, getattr(each, name)) for step, each in points]) for name in BOUNDS}
        for pid, points in warm.items()
        if points and points[-1][0] - points[0][0] >= ENOUGH
    }


def growths(held: Sequence[tuple[int, Held]]) -> list[str]:
    """Return a sentence for each process that holds more and more."""
    return [
        f"process {pid} holds more and more {name}: {growth:.0f} in 1000 steps, more than {BOUNDS[name]}"
        for pid, of_process in slopes(held).items()
        for name, growth in of_process.items()
        if growth > BOUNDS[name]
    ]
