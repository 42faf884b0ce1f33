"""Predictions compared with measured rows: fits of machines to rows, errors, and the regret of choices."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from burst_bench.published.methods import FITTED, figure_of, plan_of
from burst_bench.published.rows import CPU, Row, read, rows_of
from burst_bench.published.training import OUT_OF_MEMORY, of_row
from burst_bench.published.training import figure as figure_of_step
from burst_mcore.rates import Rates
from burst_plan.machines import MACHINES, Machine
from burst_plan.step.plan import Plan

LEGAL = f"one of {', '.join(MACHINES)}"
"""The known machines, for messages."""
CLIPPED = 0.5
"""Upper limit of an error: a few rows that no model explains must not determine a fit."""
START, STOP = 0.3, 0.01
"""First and last step of the search, as shares of the varied number."""


@dataclass(frozen=True)
class Compared:
    """One figure: its row, and the prediction for it."""

    entries: Mapping[str, Any]
    """The fields of the input."""
    measured: float | None
    predicted: float | None
    why: str | None = None
    """The reason why nothing is predicted."""
    row: Row | None = None
    """The row of attention; None for a figure of a whole training step."""
    calibrated: bool = False
    """Whether the figure was used for calibration."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None if one of them is missing."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted / self.measured - 1

    @property
    def split(self) -> str:
        """The method and the number of ranks that share heads."""
        assert self.row is not None
        return self.row.method + f" head_parallel={self.row.head_parallel}" * bool(self.row.head_parallel)

    @property
    def words(self) -> str:
        row, entries = self.row, self.entries
        if row is None:
            where = f"{entries['gpus']} {entries['hardware']}, {entries['seq']}"
            how = f"{Plan(**entries['plan'])} {entries.get('method', '')}".rstrip()
            return f"{entries['model'].get('name', 'a model')} on {where}, {how}, {entries['metric']}"
        shape = f"{row.gpus} {row.hardware}, {row.seq} x {row.heads}:{row.kv_heads} x {row.head_dim}"
        return f"{shape}, {row.mask} {row.passes}, {self.split} {row.variant}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """Return the input with "measured" and "predicted", and "why" if there is no prediction."""
        why = {} if self.why is None else {"why": self.why}
        return {**self.entries, "measured": self.measured, "predicted": self.predicted, **why}


@dataclass(frozen=True)
class Report:
    """All figures of some files."""

    compared: Sequence[Compared]
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """The machines with fitted numbers."""

    @property
    def judged(self) -> list[Compared]:
        """The figures that were predicted, and not used for calibration."""
        return [one for one in self.compared if one.error is not None and not one.calibrated]

    @property
    def errors(self) -> list[float]:
        """Absolute errors of `judged`, in ascending order."""
        return sorted(abs(one.error) for one in self.judged if one.error is not None)

    @property
    def median(self) -> float:
        return statistics.median(self.errors) if self.errors else math.nan

    def within(self, share: float) -> float:
        """Return the quantile of the errors at a share of the figures."""
        return self.errors[min(len(self.errors) - 1, int(share * len(self.errors)))]

    @property
    def regret(self) -> list[dict[str, Any]]:
        """For each group of rows that differ in split alone: the choice by predictions, and its regret.

        The regret is the best measured figure over that of the chosen split, less 1. A split is a method and
        the number of ranks that share heads.
        """
        groups: dict[tuple[tuple[object, ...], str], dict[str, list[Compared]]] = {}
        for one in self.compared:
            if one.row is not None and one.error is not None:
                splits = groups.setdefault((one.row.group, one.row.figure), {})
                splits.setdefault(one.split, []).append(one)
        return [_regret(group, splits) for (group, _), splits in groups.items() if len(splits) > 1]

    def as_json(self) -> dict[str, Any]:
        """Return the rows, the median error and the regrets, for the last line of output."""
        return {
            "rows": [one.as_json() for one in self.compared],
            "median_error": self.median if self.errors else None,
            "regret": self.regret,
        }

    def text(self) -> str:
        """Return all figures as a table, the fitted numbers, errors by source, and a sentence about all."""
        headers = ("figure", "measured", "predicted", "error", "")
        lines = [
            (one.words, one.measured, one.predicted, one.error,
             one.why or "used for calibration" * one.calibrated)
            for one in self.compared
        ]  # fmt: skip
        table: str = tabulate(lines, headers, floatfmt=("", ".4g", ".4g", "+.1%", ""), missingval="-")
        fits = [
            f"calibrated: {name}: " + ", ".join(f"{x} {getattr(machine, x):.3g}" for x in machine.fitted)
            for name, machine in self.machines.items()
        ]
        return "\n".join([table, "", self._by_source(), "", *fits, self.sentence])

    def _by_source(self) -> str:
        """Return a table of the errors of `judged`, by source and metric."""
        errors: dict[tuple[str, str], list[float]] = defaultdict(list)
        for one in self.judged:
            metric = one.row.figure if one.row is not None else one.entries["metric"]
            errors[str(one.entries.get("source", "")), metric].append(one.error or 0.0)
        lines = [(*key, len(of), min(of), statistics.median(of), max(of)) for key, of in errors.items()]
        headers = ("source", "metric", "figures", "least error", "median", "largest")
        return str(tabulate(lines, headers, floatfmt="+.1%"))

    @property
    def sentence(self) -> str:
        errors, regrets = self.errors, [one["regret"] for one in self.regret]
        if not errors:
            return f"{len(self.compared)} figures, none of them both measured and predicted"
        groups = f"{sum(regret <= 0.05 for regret in regrets)} of {len(regrets)} groups"
        runs = [one.predicted for one in self.compared if one.row is None and one.measured is None]
        wrong = sum(bool(one.measured) and str(one.why).startswith(OUT_OF_MEMORY) for one in self.compared)
        memory = (
            f"; of {len(runs)} figures of runs that failed {runs.count(None)} are predicted so, of those "
            f"that ran {wrong} are wrongly predicted out of memory"
        )
        return (
            f"{len(self.compared)} figures, {len(errors)} predicted and not used for calibration: "
            f"median error {self.median:.1%}, 90 % of them within {self.within(0.9):.1%}"
            + f"; the chosen split is within 5 % of the best in {groups}" * bool(regrets)
            + memory * bool(runs or wrong)
        )


def _regret(group: tuple[object, ...], splits: Mapping[str, Sequence[Compared]]) -> dict[str, Any]:
    """Return the regret of a group, of each split its best variant."""
    measured = {split: max(one.measured or 0.0 for one in rows) for split, rows in splits.items()}
    predicted = {split: max(one.predicted or 0.0 for one in rows) for split, rows in splits.items()}
    chosen, best = max(predicted, key=predicted.__getitem__), max(measured, key=measured.__getitem__)
    return {
        "group": " ".join(map(str, group)),
        "chosen": chosen,
        "measured_best": best,
        "regret": measured[best] / measured[chosen] - 1,
    }


def compare(files: Iterable[Path], calibrate: Iterable[Path] = (), rates: Rates | None = None) -> Report:
    """Return the figures of files of rows, of attention or of training steps, with predictions.

    Machines are fitted first to the rows of attention in `calibrate`; or all rows are of one machine with
    `rates`. Raises a ValueError for both, and for a file or a row that is not legal.
    """
    used = [row for path in calibrate for row in _to_fit(path)]
    if rates is not None and used:
        raise ValueError("--rates replaces the machines that --calibrate fits: give one of them")
    machines = calibrated(used)
    presets = {**MACHINES, **machines}
    report = Report([one for path in files for one in _figures(path, presets, rates, {*used})], machines)
    if rates is not None and any(one.row is None for one in report.compared):
        raise ValueError(
            "--rates holds for rows of attention: steps need a machine's peak and memory as well"
        )
    return report


def _to_fit(path: Path) -> list[Row]:
    """Return the rows of attention of a file, all of them of known machines."""
    rows = [row for _, row in rows_of(read(path), path) if row is not None]
    if not rows:
        raise ValueError(f"{path} has no rows of attention, to which machines are fitted")
    for row in rows:
        if row.hardware not in MACHINES:
            raise ValueError(f"{path}: rows of {row.hardware!r} cannot be fitted: {LEGAL}")
    return rows


def _figures(
    path: Path, machines: Mapping[str, Machine], rates: Rates | None, used: Collection[Row]
) -> Iterator[Compared]:
    """Yield the figures of one file, by these machines, or by the rates of all its rows."""
    contents = read(path)
    if not contents:
        raise ValueError(f"{path} has no rows")
    for entries, row in rows_of(contents, path):
        if row is None:
            run, measured = of_row(entries), entries["value"]
            figure = run if isinstance(run, str) else figure_of_step(run, entries["metric"], machines)
        else:
            figure, measured = _predict(row, machines, rates), row.measured
        predicted, why = (None, figure) if isinstance(figure, str) else (figure, None)
        yield Compared(entries, measured, predicted, why, row, row in used)


def _predict(row: Row, machines: Mapping[str, Machine], rates: Rates | None) -> float | str:
    """Return the figure of a row of attention, or the reason for no prediction."""
    if rates is None and row.hardware == CPU:
        return "no preset knows this CPU: give --rates FILE, as burst-mcore calibrate writes it"
    if rates is None and row.hardware not in machines:
        raise ValueError(f"unknown machine {row.hardware!r}: {LEGAL}, or any with --rates FILE")
    return figure_of(row, rates or machines[row.hardware].rates_by(FITTED))


def calibrated(rows: Iterable[Row]) -> dict[str, Machine]:
    """Return the machines of the rows, with their two numbers (`Machine.fitted`) fitted to these rows."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not isinstance(plan_of(row), str):
            groups[row.hardware].append(row)
    return {name: fitted_machine(MACHINES[name], members) for name, members in groups.items()}


def fitted_machine(machine: Machine, rows: Sequence[Row]) -> Machine:
    """Return the fitted machine. Rows of both passes together scale both numbers alike."""
    passes = {row.passes for row in rows}
    groups: list[tuple[str, ...]] = [(name,) for name in machine.fitted]
    if machine.switched and not passes >= {"fwd", "bwd"}:
        single = ("forward",) if passes == {"fwd"} else ("backward",)
        groups = [machine.fitted if "fwd+bwd" in passes else single]
    start = {name: float(getattr(machine, name)) for name in machine.fitted}

    def loss(values: Mapping[str, Any]) -> float:
        """Return the loss with the preset as one more row: a few rows alone do not overrule it."""
        shift = max(abs(math.log(values[name] / value)) for name, value in start.items())
        return loss_of(rows, replace(machine, **values)) + shift / len(rows)

    return replace(machine, **descend(start, groups, loss))


def loss_of(rows: Sequence[Row], machine: Machine) -> float:
    """Return the mean absolute logarithmic error of rows that the model can predict, each clipped."""
    rates = machine.rates_by(FITTED)
    ratios = [float(figure_of(row, rates)) / row.measured for row in rows]
    return sum(min(CLIPPED, abs(math.log(ratio))) for ratio in ratios) / len(rows)


def descend(
    values: Mapping[str, float],
    groups: Sequence[Sequence[str]],
    loss: Callable[[Mapping[str, float]], float],
) -> dict[str, Any]:
    """Return the values of the least loss: each group is scaled up and down, by ever smaller steps."""
    best, minimum, step = dict(values), loss(values), START
    while step > STOP:
        before = minimum
        for names, factor in itertools.product(groups, (1 + step, 1 / (1 + step))):
            trial = {**best, **{name: best[name] * factor for name in names}}
            if (value := loss(trial)) < minimum - 1e-6:
                best, minimum = trial, value
        if minimum == before:
            step /= 2
    return best
