"""Fits of the cost model to measured rows: two numbers of a machine, by its own rows."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from burst_bench.published.methods import seconds_of, way_of
from burst_bench.published.rows import Row
from burst_mcore.machines import CONSTANTS, MACHINES, Constants, Machine

FITTED = replace(CONSTANTS, call=CONSTANTS.loops)
"""Constants of public rows, which are those of other projects' loops."""
CLIPPED = 0.5
"""Errors beyond count as so much: a few rows that no model explains shall not decide a fit."""
START, STOP = 0.3, 0.01
"""Steps of the search, as shares of the number that is varied: the first, and the last."""


def by_machine(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows that the model can predict, by machine."""
    known: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.hardware in MACHINES and not isinstance(way_of(row), str):
            known[row.hardware].append(row)
    return known


def calibrated(rows: Iterable[Row], constants: Constants = FITTED) -> dict[str, Machine]:
    """Return the machines of the rows, their two numbers (`Machine.fitted`) fitted to their own rows."""
    return {name: fitted_machine(MACHINES[name], own, constants) for name, own in by_machine(rows).items()}


def fitted_machine(machine: Machine, rows: Sequence[Row], constants: Constants) -> Machine:
    """Fit a machine. Rows of both passes together scale both numbers alike."""
    passes = {row.passes for row in rows}
    groups: list[tuple[str, ...]] = [(name,) for name in machine.fitted]
    if machine.switched and not passes >= {"fwd", "bwd"}:
        alone = ("forward",) if passes == {"fwd"} else ("backward",)
        groups = [machine.fitted if "fwd+bwd" in passes else alone]
    start = {name: float(getattr(machine, name)) for name in machine.fitted}

    def loss(values: Mapping[str, Any]) -> float:
        """The preset counts as one more row: a few rows alone do not overrule it."""
        moved = max(abs(math.log(values[name] / value)) for name, value in start.items())
        return loss_of(rows, replace(machine, **values), constants) + moved / len(rows)

    return replace(machine, **descend(start, groups, loss))


def loss_of(rows: Sequence[Row], machine: Machine, constants: Constants) -> float:
    """Return the mean error of rows, as logarithms, each clipped."""
    return sum(min(CLIPPED, abs(error(row, machine, constants))) for row in rows) / len(rows)


def error(row: Row, machine: Machine, constants: Constants = FITTED) -> float:
    """Return the logarithm of predicted over measured."""
    way = way_of(row)
    assert not isinstance(way, str)
    return math.log(row.figure_of(seconds_of(row, way, machine.rates_by(constants))) / row.measured)


def descend(
    values: Mapping[str, float],
    groups: Sequence[Sequence[str]],
    loss: Callable[[Mapping[str, float]], float],
) -> dict[str, Any]:
    """Return the values of the least loss: each group is scaled up and down, by ever smaller steps."""
    best, least, step = dict(values), loss(values), START
    while step > STOP:
        before = least
        for names, factor in itertools.product(groups, (1 + step, 1 / (1 + step))):
            tried = {**best, **{name: best[name] * factor for name in names}}
            if (now := loss(tried)) < least - 1e-6:
                best, least = tried, now
        if least == before:
            step /= 2
    return best
