"""Results of a run: figures with their bars, and the JSON format of all subjects."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from burst_bench.core import ALL, Bar, Case, Derived, Table
from burst_plan import provenance

SCHEMA = 1
UNITS = {
    "B": ("peak", "written", "sent", "all-gather", "least"),
    "s": ("cpu", "wall", "recomputing", "saved", "predicted", "latency", "kernel", "emulated"),
    "FLOP": ("flops",),
}
"""Meters by their unit, which the last word of a meter names. Others are ratios, or end in their unit."""


def unit_of(meter: str) -> str:
    """Return the unit of a meter's samples."""
    last = meter.split()[-1]
    if "/" in meter.split():
        return "x"
    return next((unit for unit, meters in UNITS.items() if last in meters), last if "/s" in last else "")


@dataclass
class Results:
    """All results of a run of a subject, complete after each case."""

    subject: str
    about: str
    device: str
    repeats: int | None
    """None if an old run did not record them."""
    cases: dict[str, Any] = field(default_factory=dict)
    """The fields of each case, by name."""
    tables: dict[str, Table] = field(default_factory=dict)
    """The figures of each case, and of ALL cases."""
    refused: list[dict[str, str]] = field(default_factory=list)
    """Methods that were not timed: case, method, reason."""
    errors: list[dict[str, str]] = field(default_factory=list)
    """Cases that failed: case, error."""
    bars: list[Bar] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    """Claims with a missing figure."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader."""

    def add(self, case: str, figures: Derived) -> None:
        """Add the figures of a case, without empty ones."""
        for method, meter, samples in figures:
            if len(samples):
                self.tables.setdefault(case, Table())[method, meter] = tuple(samples)

    def judge(self, subject: type[Case], cases: Mapping[str, Case]) -> None:
        """Compare every figure with its bar, and list the claims without a figure."""
        self.bars, self.not_judged = [], []
        bars = [replace(bar, case=name) for name, case in cases.items() for bar in case.bars(self.device)]
        for bar in (*bars, *(replace(bar, case=ALL) for bar in subject.overall)):
            samples = self.tables.get(bar.case, Table()).get((bar.method, bar.meter))
            if samples:
                self.bars.append(replace(bar, value=statistics.median(samples)))
            else:
                self.not_judged.append(f"{bar.case}: {bar.claim}")

    def as_json(self) -> str:
        """Return the file of this run, with commit, machine and versions as of now."""
        entries = {
            "schema": SCHEMA, "subject": self.subject, "about": self.about,
            **provenance.made_by(self.device),
            "device": self.device, "repeats": self.repeats, "cases": self.cases,
            "bars": [{**asdict(bar), "reached": bar.reached} for bar in self.bars],
            "not judged": self.not_judged, "refused": self.refused, "errors": self.errors,
            "notes": self.notes,
        }  # fmt: skip
        figures = (_figure(case, *key, table[key]) for case, table in self.tables.items() for key in table)
        lines = ",\n  ".join(map(json.dumps, figures))  # a figure a line: short, and easy to compare
        return f'{json.dumps(entries, indent=1)[:-2]},\n "figures": [\n  {lines}\n ]\n}}\n'


def _figure(case: str, method: str, meter: str, samples: Sequence[float]) -> dict[str, Any]:
    figure = {"case": case, "method": method, "meter": meter, "samples": samples}
    return {**figure, "unit": unit_of(meter), "median": statistics.median(samples)}


def read(path: Path) -> Results:
    """Return the results of a file.

    Raises:
        ValueError: it is not of this schema.
    """
    entries = json.loads(path.read_text())
    if entries.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a file of `burst-mcore bench`, schema {SCHEMA}")
    names = ("subject", "about", "device", "repeats", "cases", "refused", "errors", "notes")
    bars = [Bar(**{k: v for k, v in bar.items() if k != "reached"}) for bar in entries["bars"]]
    results = Results(**{name: entries[name] for name in names}, bars=bars, not_judged=entries["not judged"])
    for figure in entries["figures"]:
        results.add(figure["case"], [(figure["method"], figure["meter"], figure["samples"])])
    return results
