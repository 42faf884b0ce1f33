"""Rows of measurements: a figure of a method on a cluster, published or recorded by `bench attention`."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from burst_bench.core import METHODS, Method, Table
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.dtypes import TRAINED
from burst_mcore.mask import Mask
from burst_plan import provenance
from burst_plan.machines import machine_of
from burst_plan.simulate.cost import allowed_pairs

MASKS = ("causal", "full", "varlen_causal", "varlen_full")
PASSES = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
"""Passes that a figure covers, and their FLOPs as multiples of a forward's."""
COUNTS = ("gpus", "gpus_per_node", "heads", "kv_heads", "head_dim", "batch", "seq", "head_parallel")
"""Fields that are positive integers."""
WORDS = ("hardware", "method", "variant", "source")
"""Fields with any text."""
CPU = "cpu"
"""Hardware of rows that were measured on some CPU; a file of rates predicts them, no preset does."""
LAYOUTS = {"basic": "contiguous", "zigzag": "zigzag", "stripe": "striped", "strip": "striped"}
"""Layouts by names in a row's variant, which are ring-flash-attention's."""
FIGURES = ("tflops", "iterations_per_second")
"""Figures of a row: 10**12 FLOPs a second and GPU, or passes a second of the slowest rank."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure of an attention layer. Raises ValueError for a field that is missing or wrong."""

    hardware: str
    """A name of `burst_mcore.machines.MACHINES`, or `CPU`; with given rates, any machine."""
    gpus: int
    gpus_per_node: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    seq: int
    """Tokens of the whole sequence."""
    mask: str
    passes: str
    method: str
    head_parallel: int | None = None
    """Ranks that share heads; None: the method's default."""
    variant: str = ""
    """Options of the method: basic, zigzag or stripe for the layout; qkvpack if Q, K, V rotate as one."""
    dtype: str = "bfloat16"
    tflops: float | None = None
    iterations_per_second: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        legal = {"mask": MASKS, "passes": tuple(PASSES), "dtype": tuple(TRAINED)}
        for name, value in vars(self).items():
            if name in COUNTS and value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
            if name in WORDS and not isinstance(value, str):
                raise ValueError(f"{name} must be words, got {value!r}")
            if name in legal and value not in legal[name]:
                raise ValueError(f"{name} must be one of {', '.join(legal[name])}, got {value!r}")
        if self.gpus % min(self.gpus, self.gpus_per_node):
            raise ValueError(f"{self.gpus} gpus do not go evenly on nodes of {self.gpus_per_node}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if sum(getattr(self, name) is not None for name in FIGURES) != 1:
            raise ValueError(f"a row has one figure of {' and '.join(FIGURES)}")
        figure = getattr(self, self.figure)
        if isinstance(figure, bool) or not isinstance(figure, (int, float)) or not 0 < figure < math.inf:
            raise ValueError(f"{self.figure} must be a positive number, got {figure!r}")

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Row:
        """Return the row of a JSON object; entries that are no fields, or null, are left out."""
        names = [field.name for field in fields(cls)]
        values = {name: entries[name] for name in names if entries.get(name) is not None}
        if absent := [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]:
            raise ValueError(f"has no {', '.join(absent)}")
        return cls(**values)

    @property
    def figure(self) -> str:
        """The name of the figure: "tflops" or "iterations_per_second"."""
        return "tflops" if self.tflops is not None else "iterations_per_second"

    @property
    def measured(self) -> float:
        return float(getattr(self, self.figure))

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.gpus, min(self.gpus, self.gpus_per_node))

    @property
    def seen(self) -> Mask:
        """The mask, without documents."""
        return Mask.causal() if self.mask == "causal" else Mask.full()

    @property
    def varlen(self) -> bool:
        """Whether the row packs documents, whose lengths it does not give."""
        return self.mask.startswith("varlen")

    def figure_of(self, seconds: float) -> float:
        """Return the figure of a run that takes `seconds`, in the unit of the row's figure."""
        if self.figure == "iterations_per_second":
            return 1 / seconds
        pairs = allowed_pairs(self.seen, self.seq)
        flops = 4 * pairs * self.batch * self.heads * self.head_dim * PASSES[self.passes]
        return flops / seconds / self.gpus / 1e12

    @property
    def group(self) -> tuple[object, ...]:
        """The group of a user's choice: its rows differ in method and variant alone."""
        shape = self.heads, self.kv_heads, self.head_dim, self.batch, self.seq
        return self.hardware, self.gpus, self.gpus_per_node, *shape, self.mask, self.passes, self.dtype


def read(path: Path) -> list[Any]:
    """Return the rows of a JSON file, unchecked. Raises ValueError for other files."""
    try:
        contents = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(contents, list):
        raise ValueError(f"{path} holds no list of rows")
    return contents


def rows_of(contents: Sequence[Any], path: Path) -> Iterator[tuple[Mapping[str, Any], Row | None]]:
    """Yield (JSON object, row; None for a row of training). Raises ValueError, with the row's number."""
    for number, entries in enumerate(contents):
        if not isinstance(entries, Mapping):
            raise ValueError(f"{path}, row {number}: a row is an object, got {entries!r}")
        try:
            yield entries, None if entries.get("pass") == "train" else Row.of(entries)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, row {number}: {error}") from None


def record(path: Path, tables: Mapping[str, Table], cases: Mapping[str, Any], device: str) -> int:
    """Append the rows of a run of `bench attention` to a file; return their number."""
    rows = [*measured_rows(tables, cases, device)]
    lines = ",\n ".join(map(json.dumps, [*(read(path) if path.exists() else []), *rows]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n {lines}\n]\n" if lines else "[]\n")
    return len(rows)


def measured_rows(
    tables: Mapping[str, Table], cases: Mapping[str, Any], device: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each timed method whose mask, layout and settings rows can express."""
    source = f"burst-mcore bench attention, commit {provenance.commit()}"
    for name, table in tables.items():
        for method in table.methods:
            row_method, walls = METHODS.get(("attention", method)), table.get((method, "wall"))
            shape = None if row_method is None else _shape(cases[name], row_method, device)
            if walls and shape is not None:
                figure = Row(**shape, tflops=1.0).figure_of(statistics.median(walls))
                yield {**shape, "tflops": float(f"{figure:.4g}"), "source": source}


def _shape(case: Any, method: Method, device: str) -> dict[str, Any] | None:
    """Return all fields of a row but its figure; None if rows cannot express the mask or the layout."""
    variant = next((word for word, layout in LAYOUTS.items() if layout == case.layout), None)
    if not method.row or case.mask not in ("causal", "full") or variant is None:
        return None
    names = {field.name for field in fields(Row)}
    shape = {name: value for name, value in vars(case).items() if name in names}
    gpu = CPU if device == "cpu" else torch.cuda.get_device_name()
    node = int(os.environ.get("LOCAL_WORLD_SIZE", case.ranks))
    where = {"hardware": machine_of(gpu) or gpu, "gpus": case.ranks, "gpus_per_node": node}
    return {**where, **shape, "variant": variant, **method.row}
