"""Predictions beside measured rows: errors, and what a choice by predictions would have cost."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from burst_mcore.machines import MACHINES, Machine
from burst_mcore.plan.fit import calibrated
from burst_mcore.plan.methods import seconds_of, way_of
from burst_mcore.plan.paper import figures
from burst_mcore.plan.rows import Row, read, rows_of
from burst_mcore.plan.training import OUT_OF_MEMORY, fitted, of_row
from burst_mcore.plan.training import figure as figure_of


@dataclass(frozen=True)
class Compared:
    """One figure: what was read, and what is predicted of it."""

    entries: Mapping[str, Any]
    """The fields of the input."""
    measured: float | None
    predicted: float | None
    why: str | None = None
    """Why nothing is predicted."""
    row: Row | None = None
    calibrated: bool = False
    """Whether the figure was used for calibration."""
    step: bool = False
    """Whether the figure is of a whole training step."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None if one of them is missing."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted / self.measured - 1

    @property
    def words(self) -> str:
        """The row in words."""
        row = self.row
        if self.step and "method" in self.entries:
            model, gpus = self.entries["model"]["name"], self.entries["gpus"]
            where = f"{gpus} {self.entries['hardware']}, {self.entries['seq']}"
            return f"{model} on {where}, {self.entries['method']}, {self.entries['metric']}"
        if row is None or "name" in self.entries:
            return str(self.entries.get("name", ""))
        shape = f"{row.gpus} {row.hardware}, {row.seq} x {row.heads}:{row.kv_heads} x {row.head_dim}"
        return f"{shape}, {row.mask} {row.passes}, {_method(self)}"

    def as_json(self) -> dict[str, Any]:
        """Return the input with "measured" and "predicted", and "why" if nothing is predicted."""
        why = {} if self.why is None else {"why": self.why}
        return {**self.entries, "measured": self.measured, "predicted": self.predicted, **why}


@dataclass(frozen=True)
class Report:
    """All figures of some files."""

    compared: Sequence[Compared]
    machines: Mapping[str, Machine] = field(default_factory=dict)
    """The machines whose numbers were fitted."""

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
        """The median error; NaN where nothing is judged."""
        return statistics.median(self.errors) if self.errors else math.nan

    def within(self, share: float) -> float:
        """Return the error that a share of the figures does not exceed."""
        errors = self.errors
        return errors[min(len(errors) - 1, int(share * len(errors)))]

    @property
    def regret(self) -> list[dict[str, Any]]:
        """For each group of rows that differ in split alone: the choice by predictions, and its regret.

        The regret is the best measured figure over that of the chosen split, less 1. A split is a method and
        how many ranks share heads.
        """
        groups: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
        for one in self.compared:
            if one.row is not None and one.error is not None:
                groups[one.row.group].append(one)
        regrets = [_regret(group, members) for group, members in groups.items()]
        return [regret for regret in regrets if regret is not None]

    def as_json(self) -> dict[str, Any]:
        """Return the rows, the median error and the regrets, for the last line of output."""
        return {
            "rows": [one.as_json() for one in self.compared],
            "median_error": self.median if self.errors else None,
            "regret": self.regret,
        }

    def text(self) -> str:
        """Return all figures as a table, the numbers that were fitted, and the errors in a sentence."""
        headers = ("figure", "measured", "predicted", "error", "")
        lines = [
            (one.words, one.measured, one.predicted, _percent(one.error), _remark(one))
            for one in self.compared
        ]
        table: str = tabulate(lines, headers, floatfmt=".4g", missingval="-")
        return "\n".join([table, "", *map(_fitted, self.machines.values()), self.sentence])

    @property
    def _memory(self) -> str:
        """Say of which runs that failed the model foresees it, and of which that did not it wrongly does."""
        failed = [one for one in self.compared if one.step and one.measured is None]
        if not failed:
            return ""
        foreseen = sum(one.predicted is None for one in failed)
        wrong = sum(
            one.measured is not None and (one.why or "").startswith(OUT_OF_MEMORY) for one in self.compared
        )
        return (
            f"; of {len(failed)} figures of runs that failed {foreseen} are predicted so, of those that ran "
            f"{wrong} are wrongly predicted out of memory"
        )

    @property
    def sentence(self) -> str:
        """The errors in words."""
        errors, regrets = self.errors, [one["regret"] for one in self.regret]
        if not errors:
            return f"{len(self.compared)} figures, none of them both measured and predicted"
        within = sum(regret <= 0.05 for regret in regrets)
        chosen = f"; the chosen split is within 5 % of the best in {within} of {len(regrets)} groups"
        return (
            f"{len(self.compared)} figures, {len(errors)} predicted and not used for calibration: "
            f"median error {self.median:.1%}, 90 % of them within {self.within(0.9):.1%}"
            f"{chosen if regrets else ''}{self._memory}"
        )


def _fitted(machine: Machine) -> str:
    numbers = ", ".join(f"{name} {getattr(machine, name):.3g}" for name in machine.fitted)
    return f"calibrated: {machine.name}: {numbers}"


def _regret(group: tuple[object, ...], members: Sequence[Compared]) -> dict[str, Any] | None:
    """Return the regret of a group, of each split its best variant; None if all rows are of one split."""
    splits: dict[str, list[Compared]] = defaultdict(list)
    for one in members:
        splits[_split(one)].append(one)
    if len(splits) == 1:
        return None
    measured = {split: max(one.measured or 0.0 for one in rows) for split, rows in splits.items()}
    predicted = {split: max(one.predicted or 0.0 for one in rows) for split, rows in splits.items()}
    chosen, best = max(predicted, key=predicted.__getitem__), max(measured, key=measured.__getitem__)
    return {
        "group": " ".join(map(str, group)),
        "chosen": chosen,
        "measured_best": best,
        "regret": measured[best] / measured[chosen] - 1,
    }


def _split(one: Compared) -> str:
    """Return the method and how many ranks share heads."""
    assert one.row is not None
    heads = one.row.head_parallel
    return one.row.method if heads is None else f"{one.row.method} head_parallel={heads}"


def _method(one: Compared) -> str:
    assert one.row is not None
    return f"{_split(one)} {one.row.variant}".rstrip()


def _percent(error: float | None) -> str | None:
    return None if error is None else f"{error:+.1%}"


def _remark(one: Compared) -> str:
    return one.why or ("used for calibration" if one.calibrated else "")


def compare(files: Iterable[Path], calibrate: Iterable[Path] = ()) -> Report:
    """Return the figures of files beside predictions; machines are calibrated on the rows of other files.

    Raises:
        ValueError: a file or a row that is not legal, with its name and number.
    """
    given = [one for path in calibrate for one in _figures(path, MACHINES, frozenset())]
    machines = calibrated([one.row for one in given if one.row])
    steps = {(one.entries["name"], one.entries["metric"]) for one in given if "metric" in one.entries}
    used: frozenset[object] = frozenset([one.row for one in given if one.row]) | steps
    known = {**MACHINES, **machines}
    return Report([one for path in files for one in _figures(path, known, used)], machines)


def _figures(path: Path, machines: Mapping[str, Machine], used: frozenset[object]) -> list[Compared]:
    """Return the figures of one file."""
    contents = read(path)
    if isinstance(contents, Mapping):
        return [_of_paper(one, machines, used) for one in figures(contents)]
    if contents and all(isinstance(one, Mapping) and one.get("pass") == "train" for one in contents):
        return [_of_training(one, machines) for one in contents]
    return [
        Compared(entries, row.measured, *_predict(row, machines), row, row in used)
        for entries, row in rows_of(contents, path)
    ]


def _of_paper(figure: Any, machines: Mapping[str, Machine], used: frozenset[object]) -> Compared:
    entries = {"name": figure.name, "metric": figure.metric}
    if figure.row is None:
        value, why = (
            (None, run) if isinstance(run := figure.run, str) else figure_of(run, figure.metric, machines)
        )
        name = figure.name, figure.metric
        return Compared(entries, figure.measured, value, why, calibrated=name in used, step=True)
    predicted, why = _predict(figure.row, machines)
    row = figure.row if figure.measured is not None else None
    return Compared(entries, figure.measured, predicted, why, row, figure.row in used)


def _of_training(entries: Mapping[str, Any], machines: Mapping[str, Machine]) -> Compared:
    run = of_row(entries)
    value, why = (None, run) if isinstance(run, str) else figure_of(run, entries["metric"], machines)
    return Compared(entries, entries["value"], value, why, calibrated=fitted(entries), step=True)


def _predict(row: Row, machines: Mapping[str, Machine]) -> tuple[float | None, str | None]:
    """Return (figure, None), or (None, the reason why there is none)."""
    if row.hardware not in machines:
        raise ValueError(f"unknown machine {row.hardware!r}: one of {', '.join(machines)}")
    way = way_of(row)
    if isinstance(way, str):
        return None, way
    return row.figure_of(seconds_of(row, way, machines[row.hardware].rates)), None
