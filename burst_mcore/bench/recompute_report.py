"""What `bench recompute` prints and draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from burst_mcore.bench import provenance
from burst_mcore.bench.recompute import Row
from burst_mcore.bench.recompute_methods import Stack
from burst_mcore.bench.verdict import Verdict, bars

CLOSE = 0.05
"""How far what is saved may be from what the FLOP model says."""


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """What each policy saves beside full recompute, over what the FLOP model says."""
    found = []
    for row in rows:
        if row.predicted_seconds and row.saved_seconds is not None:
            off = abs(row.saved_seconds / row.predicted_seconds - 1)
            claim = f"{row.method}: time saved, off the FLOP model's"
            found.append(Verdict(claim, off, CLOSE, at_most=True))
    return found


def report(rows: Sequence[Row], judged: Sequence[Verdict]) -> str:
    """Table and bars."""
    table = tabulate(
        [
            {
                "recompute": row.method,
                "CPU s, all ranks": row.cpu_seconds,
                "wall s": row.wall_seconds,
                "recomputing, CPU s": row.recompute_seconds,
                "saved, CPU s": row.saved_seconds,
                "by FLOPs": row.predicted_seconds,
                "peak MB": None if row.peak_bytes is None else row.peak_bytes / 1e6,
                "attention forward TFLOP": row.attention_flops / 1e12,
                "error": row.error,
            }
            for row in rows
        ],
        headers="keys",
        floatfmt=("", ".1f", ".1f", ".2f", ".2f", ".2f", ".0f", ".2f", ".0e"),
    )
    return f"{table}\n\n{bars(judged)}"


def as_json(stack: Stack, ranks: int, repeats: int, rows: Sequence[Row], judged: Sequence[Verdict]) -> str:
    """All figures, and what they are of."""
    return provenance.as_json(
        asdict(stack),
        ranks=ranks,
        repeats=repeats,
        rows=[row.row() for row in rows],
        verdicts=[{**asdict(verdict), "reached": verdict.reached} for verdict in judged],
    )


def save_curve(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG: peak memory of a step against its time, our policies as a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [row for row in rows if row.peak_bytes is not None]
    figure, panel = pyplot.subplots(figsize=(8, 5), layout="constrained")
    ours = [row for row in known if row.saved_seconds is not None]
    others = [row for row in known if row.saved_seconds is None]
    for group, style, label in ((ours, "o-", "this package"), (others, "s", "others, and no recompute")):
        panel.plot(
            [(row.peak_bytes or 0) / 1e6 for row in group],
            [row.cpu_seconds for row in group],
            style,
            label=label,
        )
    for row in known:
        at = (row.peak_bytes or 0) / 1e6, row.cpu_seconds
        panel.annotate(row.method, at, textcoords="offset points", xytext=(6, 5), fontsize=9)
    panel.set_xlabel("peak memory of a step, MB a rank, beyond model and input")
    panel.set_ylabel("CPU seconds of a step, all ranks")
    panel.set_title(title, fontsize=10)
    panel.margins(x=0.2, y=0.1)
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
