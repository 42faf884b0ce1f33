"""LM heads side by side: the bars that ours must reach, and all figures as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from burst_mcore.bench import provenance
from burst_mcore.bench.head import LARGE, MASKED, Row
from burst_mcore.bench.head_methods import OURS
from burst_mcore.bench.verdict import Verdict, bars

MEDIANS = ("seconds", "products_seconds", "of_products", "ours_over")
NO_BARS = "no claim has a bar here: bars are for the shapes in the docs, with few masked tokens"


class Bars(NamedTuple):
    """What is asked of ours on a device."""

    shapes: tuple[str, ...]
    of_products: dict[str, float]
    """Of each dtype, time over that of the three products alone, at most."""
    no_slower: tuple[str, ...]
    """Than these methods."""
    no_larger: tuple[str, ...]
    """Than these in peak memory, where all logits together are LARGE."""


BARS = {
    "cpu": Bars(
        ("4096x1024x32000", "8192x1024x128256"),
        {"float32": 1.10, "bfloat16": 1.35},
        ("compiled-naive",),
        ("torch", "deepspeed", "compiled-naive"),
    ),
    "cuda": Bars(
        ("4096x4096x128256", "32768x4096x128256"),
        {"float32": 1.10, "bfloat16": 1.10},
        ("liger", "cce"),
        (),
    ),
}


def verdicts(rows: Sequence[Row]) -> tuple[list[Verdict], list[str]]:
    """Every claim that has a bar and was measured; and those that were not, with what is missing."""
    judged, left_open = [], []
    for (shape, dtype, _), of_problem in _by_problem(rows):
        found = {row.method: row for row in of_problem}
        for claim, value, bar in _claims(found):
            if value is None:
                left_open.append(f"{shape}, {dtype}: {claim}")
            else:
                judged.append(Verdict(f"{shape}, {dtype}: {claim}", value, bar, at_most=True))
    return judged, left_open


def _claims(found: dict[str, Row]) -> Iterator[tuple[str, float | None, float]]:
    """(claim, value, bar) of one problem; value None where something of it was not measured.

    Bars are for problems with few masked tokens: others are easier for who leaves those out.
    """
    any_row = next(iter(found.values()))
    bars_of = BARS[any_row.device]
    if any_row.shape not in bars_of.shapes or any_row.masked > MASKED:
        return
    nothing = Row(OURS, any_row.shape, any_row.dtype, any_row.device)
    ours = found.get(OURS, nothing)
    if any_row.dtype in bars_of.of_products:
        yield "time over the three products alone", ours.of_products, bars_of.of_products[any_row.dtype]
    for name in bars_of.no_slower:
        theirs = found.get(name, nothing)
        ran = ours.of_products is not None
        yield f"time over that of {name}, in turn", theirs.ours_over if ran else None, 1.0
    if _logits(any_row.shape) >= LARGE:
        for name in bars_of.no_larger:
            theirs = found.get(name, nothing)
            yield f"peak memory over that of {name}", _over(ours.peak_bytes, theirs.peak_bytes), 1.0
    yield "largest tensor made over N x V, below 1", ours.largest, 1.0 - 1.0 / _logits(any_row.shape)


def _over(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def _logits(shape: str) -> int:
    tokens, _, vocabulary = map(int, shape.split("x"))
    return tokens * vocabulary


def _by_problem(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str, float], Iterator[Row]]]:
    return groupby(rows, lambda row: (row.shape, row.dtype, row.masked))


def line(row: Row) -> str:
    """One method's result, while others still run."""
    if row.of_products is None:
        return f"{row.shape}, {row.dtype}, {row.method}: {row.why_not}"
    return f"{row.shape}, {row.dtype}, {row.method}: {row.seconds:.3g} s, {row.of_products:.2f} x"


def report(rows: Sequence[Row], judged: Sequence[Verdict], left_open: Sequence[str]) -> str:
    """A table a problem, the bars, and what was not measured."""
    parts = [
        f"{shape.replace('x', ' x ')} (tokens x hidden x vocabulary), {dtype}, "
        f"{masked:.3g} of the tokens masked\n{_table(list(of_problem))}"
        for (shape, dtype, masked), of_problem in _by_problem(rows)
    ]
    parts.append(bars(judged) if judged else NO_BARS)
    if left_open:
        parts.append("\n".join(["not judged, since not measured:", *(f"  {claim}" for claim in left_open)]))
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    text: str = tabulate([_shown(row) for row in rows], headers="keys", floatfmt=".3g", missingval="-")
    return text


def _shown(row: Row) -> dict[str, Any]:
    errors = row.errors
    return {
        "method": row.method,
        "s": row.seconds,
        "three products s": row.products_seconds,
        "/ three products": row.of_products,
        "ours / this": row.ours_over,
        "peak extra MB": None if row.peak_bytes is None else row.peak_bytes / 1e6,
        "largest / (N x V)": row.largest,
        "loss error": errors and errors.loss,
        "d_hidden error": errors and errors.d_hidden,
        "d_weight error": errors and errors.d_weight,
        "": row.why_not or ("" if errors is None else _over_less(row)),
    }


def _over_less(row: Row) -> str:
    """Says so where the errors are of a smaller vocabulary."""
    assert row.errors is not None
    whole, checked = (shape.split("x")[2] for shape in (row.shape, row.errors.over))
    return "" if whole == checked else f"errors over a vocabulary of {checked}"


def as_json(
    rows: Sequence[Row],
    judged: Sequence[Verdict],
    left_open: Sequence[str],
    threads: int,
    repeats: int,
    processes: int,
) -> str:
    """All figures, and what they are of."""
    device = torch.cuda.get_device_name() if rows and rows[0].device == "cuda" else f"{threads} threads"
    return provenance.as_json(
        "forward and backward of an LM head with the mean loss of its tokens, each method in fresh "
        f"processes ({processes}), {repeats} times in each, in turn with its three matrix products, and with "
        "ours where that is asked for; medians",
        device,
        rows=[{**asdict(row), **{name: getattr(row, name) for name in MEDIANS}} for row in rows],
        verdicts=[{**asdict(v), "reached": v.reached} for v in judged],
        **{"not judged": list(left_open)},
    )
