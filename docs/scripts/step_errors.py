"""The ranges of errors that `burst_plan.step.figures` tells, from public rows of training steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from burst_bench.published.rows import read
from burst_bench.published.training import Training, of_row, predicted, value_of
from burst_plan.machines import MACHINES
from burst_plan.step.figures import KINDS, Errors, kind_of

ROWS = "training.json"
"""The file of public rows, in benchmarks/public."""
_MEASUREMENT = ("source", "hardware", "gpus", "seq", "metric", "value")
"""Fields in which rows of one measurement agree, besides the model, whatever is assumed of its plan."""


class Judged(NamedTuple):
    """A public row whose speed is predicted."""

    row: Mapping[str, Any]
    run: Training
    value: float
    """Predicted, in the unit of the row."""

    @property
    def kind(self) -> str:
        return kind_of(self.run.plan, self.run.model)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.value / float(self.row["value"]) - 1

    @property
    def measurement(self) -> tuple[object, ...]:
        """What rows of one measurement have in common."""
        return self.run.model.name, *(self.row[name] for name in _MEASUREMENT)


@cache
def judged(folder: Path) -> Sequence[Judged]:
    """Return the rows of a folder that are predicted; none of them is used for calibration.

    Speeds are predicted even where memory is predicted not to suffice: the runs did fit.

    Raises:
        ValueError: rows that are not legal.
    """
    rows = []
    for row in read(folder / ROWS):
        run = of_row(row)
        if isinstance(run, str):
            continue
        step = predicted(run, MACHINES)
        value = None if isinstance(step, str) else value_of(row["metric"], step, run.counted)
        if value is not None:
            rows.append(Judged(row, run, value))
    return rows


def ranges(rows: Sequence[Judged]) -> list[Errors]:
    """Return the errors of rows by kind."""
    of_kind = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    return [
        Errors(
            kind,
            runs=len({one.measurement for one in members}),
            low=round(min(one.error for one in members), 3),
            high=round(max(one.error for one in members), 3),
        )
        for kind, members in of_kind.items()
        if members
    ]


def table(folder: Path) -> str:
    """Return the file `burst_plan.step.figures.TABLE`, from the rows in a folder."""
    lines = [json.dumps(errors._asdict()) for errors in ranges(judged(folder))]
    return "[\n" + ",\n".join(lines) + "\n]\n"
