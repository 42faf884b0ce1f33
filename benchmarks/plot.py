"""A results file of benchmarks/gpu.py as a picture and as a table.

    python benchmarks/plot.py benchmarks/results/<gpu>-<date>.json

writes a PNG beside the file and prints the table, in Markdown. Needs matplotlib, which gpu.py does without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Figure = dict[str, Any]


def table(figures: Sequence[Figure]) -> str:
    """Markdown: each figure with its spread, and its bar, if it has one."""
    lines = ["| figure | value | spread | bar | |", "|---|---|---|---|---|"]
    for f in figures:
        bar = "" if f["bar"] is None else f"{'<=' if f['at_most'] else '>='} {f['bar']:g}"
        verdict = {None: "", True: "reached", False: "missed"}[f["reached"]]
        lines.append(
            f"| {f['what']} | {f['value']:.3g} {f['unit']} | {f['spread']:.1%} | {bar} | {verdict} |"
        )
    return "\n".join(lines)


def save(results: Figure, path: Path) -> None:
    """A PNG with a panel for each unit: values with their spread, bars as red lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = sorted(results["figures"], key=lambda f: f["unit"])
    panels = [(unit, list(of)) for unit, of in groupby(figures, key=lambda f: f["unit"])]
    heights = [len(of) + 1 for _, of in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(12, 1 + 0.3 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (unit, of) in zip(axes[:, 0], panels, strict=True):
        values, names = [f["value"] for f in of], [f["what"] for f in of]
        axis.barh(names, values, xerr=[f["value"] * f["spread"] / 2 for f in of], color="#4c72b0", capsize=3)
        for row, f in enumerate(of):
            if f["bar"] is not None:
                axis.vlines(f["bar"], row - 0.4, row + 0.4, color="#c44e52", linewidth=2)
        axis.invert_yaxis()
        axis.set_xlabel(unit or "ratio")
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(f"{path.stem}; red: what should be reached", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    given = parser.parse_args().results
    results = json.loads(given.read_text())
    save(results, given.with_suffix(".png"))
    print(table(results["figures"]))
    for error in results.get("errors", ()):
        print(f"failed, and not in the table: {error['group']}: {error['error']}")
    print(f"\npicture: {given.with_suffix('.png')}")


if __name__ == "__main__":
    main()
