"""Results as a table for people, and as one JSON line for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tabulate import tabulate

from burst_mcore.bench.run import Result
from burst_mcore.explain.problem import Problem

HEADERS = {
    "method": "method",
    "ranks": "ranks",
    "cpu_seconds": "CPU s, all ranks",
    "wall_seconds": "wall s",
    "cpu_of_kernel": "CPU / bare kernel's",
    "error": "error / kernel's",
}


def table(results: Sequence[Result]) -> str:
    """A row a method."""
    rows = [result.row() for result in results]
    text: str = tabulate(rows, headers=HEADERS, floatfmt=("", "", ".2f", ".2f", ".3f", ".2f"))
    return text


def json_line(problem: Problem, results: Sequence[Result]) -> str:
    """All figures and what they are of."""
    return json.dumps({"problem": asdict(problem), "results": [result.row() for result in results]})
