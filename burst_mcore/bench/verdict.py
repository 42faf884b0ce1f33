"""A measured figure beside the bar that it should reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Verdict:
    """A figure beside its bar."""

    claim: str
    value: float
    bar: float
    at_most: bool

    @property
    def reached(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def bars(judged: Sequence[Verdict]) -> str:
    """A line a claim: what was measured, the bar, and whether it was reached."""
    text: str = tabulate(
        [
            {
                "claim": v.claim,
                "measured": v.value,
                "bar": f"{'<=' if v.at_most else '>='} {v.bar:g}",
                "": "reached" if v.reached else "MISSED",
            }
            for v in judged
        ],
        headers="keys",
        floatfmt=".3g",
    )
    return text
