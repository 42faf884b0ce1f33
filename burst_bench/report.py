"""Results for people: a table for each case, and the bars."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from burst_bench.core import Table
from burst_bench.results import Results, read, unit_of

SCALES = {"B": (1e6, "MB"), "FLOP": (1e12, "TFLOP")}
"""Units that are displayed at a larger scale than stored."""


def report(results: Results) -> str:
    """Return the whole report: tables, skipped methods, the bars, and notes."""
    parts = [table(results, name) for name in results.tables]
    parts += [f"{r['case']}: {r['method']} was not timed: {r['reason']}" for r in results.refused]
    parts += [f"{error['case']} failed: {error['error']}" for error in results.errors]
    parts += [bars(results), *results.notes]
    return "\n\n".join(parts)


def bars(results: Results) -> str:
    """Return the claims with their measurements, and the claims that were not judged."""
    lines = [
        (b.case, b.claim, f"{b.value:.3g}", b.must_be, "reached" if b.reached else "MISSED")
        for b in results.bars
    ]
    text = markdown(("case", "claim", "measured", "bar", ""), lines) if lines else "no claim has a bar here"
    notes = [f"not judged, since not measured: {claim}" for claim in results.not_judged]
    return "\n".join([text, *notes])


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns are aligned."""
    rows = [tuple(header), *map(tuple, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    texts = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def table(results: Results, case: str) -> str:
    """Return a case's medians and spreads: a row for each method and a column for each meter."""
    cells = results.tables.get(case, Table())
    meters = list(dict.fromkeys(meter for _, meter in cells))
    lines = [[m, *(_cell(cells.get((m, meter), ()), meter) for meter in meters)] for m in cells.methods]
    fields = "; ".join(f"{k}={v}" for k, v in results.cases.get(case, {}).items() if isinstance(v, int | str))
    heading = f"{case}\n{fields}\n" if fields else f"{case}\n"
    return heading + markdown(["", *(_shown(meter)[1] for meter in meters)], lines)


def _shown(meter: str) -> tuple[float, str]:
    """Return the scale of a meter's column, and its title."""
    unit = unit_of(meter)
    scale, name = SCALES.get(unit, (1, unit))
    return scale, meter if name in ("", "x", meter.split()[-1]) else f"{meter}, {name}"


def _cell(samples: Sequence[float], meter: str) -> str:
    if not samples:
        return ""
    median = statistics.median(samples)
    value = f"{median / _shown(meter)[0]:.3g}"
    spread = (max(samples) - min(samples)) / 2 / abs(median) if median and len(samples) > 1 else 0.0
    return f"{value} +-{spread:.0%}" if spread >= 0.01 else value


def main() -> None:
    """Print a file of results: python -m burst_bench.report FILE."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("results", type=Path)
    print(report(read(parser.parse_args().results)))  # noqa: T201


if __name__ == "__main__":
    main()
