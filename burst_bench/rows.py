"""Rows of measurements, as `burst-mcore plan --against` reads them, from results of `bench attention`."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from burst_bench.core import METHODS, Method
from burst_bench.methods.sharded import VARIANTS
from burst_bench.published.rows import CPU, Row, read
from burst_bench.results import Results
from burst_bench.subjects.attention import AttentionCase
from burst_mcore.machines import machine_of
from burst_plan import provenance


def recorded(path: Path) -> list[Any]:
    """Return the rows of a file; none if there is no file. Raises ValueError for other contents."""
    return read(path) if path.exists() else []


def record(path: Path, results: Results, cases: Mapping[str, AttentionCase]) -> int:
    """Append the rows of a run to a file; return how many there are of the run."""
    rows = [*rows_of(results, cases)]
    lines = ",\n ".join(map(json.dumps, [*recorded(path), *rows]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n {lines}\n]\n" if lines else "[]\n")
    return len(rows)


def rows_of(results: Results, cases: Mapping[str, AttentionCase]) -> Iterator[dict[str, Any]]:
    """Yield a row for each method that was timed, where a row can say what the method is and what it did."""
    source = f"burst-mcore bench attention, commit {provenance.commit()}"
    for name, table in results.tables.items():
        for method in table.methods:
            known, walls = METHODS.get(("attention", method)), table.get((method, "wall"))
            shape = None if known is None else _shape(cases[name], known, results.device)
            if walls and shape is not None:
                seconds = statistics.median(walls)
                figure = Row(**shape, tflops=1.0).figure_of(seconds)
                yield {**shape, "tflops": float(f"{figure:.4g}"), "source": source}


def _shape(case: AttentionCase, method: Method, device: str) -> dict[str, Any] | None:
    """Return all fields of a row but its figure; None if rows have no word for the mask or the layout."""
    variant = VARIANTS.get(case.layout)
    if not method.row or case.mask not in ("causal", "full") or variant is None:
        return None
    known = {field.name for field in fields(Row)}
    shape = {name: value for name, value in vars(case).items() if name in known}
    node = int(os.environ.get("LOCAL_WORLD_SIZE", case.ranks))
    where = {"hardware": hardware(device), "gpus": case.ranks, "gpus_per_node": node}
    return {**where, **shape, "variant": variant, **method.row}


def hardware(device: str) -> str:
    """Return the name of this machine in a row: a preset's, the GPU's own, or "cpu"."""
    if device == "cpu":
        return CPU
    gpu = torch.cuda.get_device_name()
    return machine_of(gpu) or gpu
