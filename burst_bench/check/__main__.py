"""Runs parts of the GPU check: python -m burst_bench.check smoke | figures [--part N].

Prints one line a claim, and writes the results of each part when it ends. The exit status is 1 if a claim
misses its bar, or could not be measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from burst_bench.check.parts import PARTS, SMOKE, Check
from burst_bench.core import Bar, Table
from burst_bench.results import Results
from burst_bench.run import device_for, run
from burst_bench.subjects.kernels import KernelCase
from burst_plan import provenance


def judged(check: Check, results: Results) -> Iterator[tuple[Bar, dict[str, Any]]]:
    """Yield each claim of a check with its figure, and its line of the results. A CPU reaches no bar."""
    table = results.tables.get(check.name, Table())
    for claim in check.claims:
        samples = table.get((claim.method, claim.meter), ())
        refused = [entry for entry in results.refused if entry["method"] == claim.method]
        reasons = [entry["error"] for entry in results.errors]
        reasons += [f"{entry['method']}: {entry['reason']}" for entry in refused]
        measured = replace(claim, value=statistics.median(samples or [math.nan]))
        yield measured, {
            "claim": claim.claim, "predicted": claim.predicted,
            "measured": measured.value if samples else None, "bar": claim.bound,
            "ok": bool(samples) and (measured.reached or results.device == "cpu"),
            "reason": None if samples else "; ".join(reasons) or f"no {claim.meter} of {claim.method}",
        }  # fmt: skip


def as_text(claim: Bar, line: dict[str, Any]) -> str:
    """Return a claim as one line of text."""
    if line["reason"] is not None:
        return f"{claim.claim}: not measured ({line['reason']})"
    bar = "" if claim.bound is None else f", bar {claim.must_be}"
    predicted = "" if claim.predicted is None else f"predicted {claim.predicted:.4g}, "
    verdict = "ok" if line["ok"] else "MISSED"
    return f"{claim.claim}: {predicted}measured {claim.value:.4g}{bar}: {verdict}"


def check_part(name: str, part: Sequence[Check], device: str, repeats: int, out: Path) -> bool:
    """Run a part, print its claims and write them; return whether all were measured and reach their bars."""
    lines: list[dict[str, Any]] = []
    for check in part:
        case = check.small if device == "cpu" else check.case
        try:
            results = run(type(case), {check.name: case}, (), repeats, device)
        except (ValueError, RuntimeError) as error:
            results = Results(case.subject, case.about(), device, repeats)
            results.errors.append({"case": check.name, "error": str(error)})
        for claim, line in judged(check, results):
            lines.append(line)
            sys.stdout.write(as_text(claim, line) + "\n")
            sys.stdout.flush()
        out.mkdir(parents=True, exist_ok=True)  # after each check: a machine may be taken back at any time
        record = {"part": name, "device": device, **provenance.made_by(device), "claims": lines}
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return all(line["ok"] for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Run the requested parts; return 0 if every claim was measured and reaches its bar, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m burst_bench.check", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("smoke", "figures"), help="smoke: two minutes; figures: all others")
    parser.add_argument("--part", type=int, help=f"of the figures, 1 to {len(PARTS)} (default: all in turn)")
    parser.add_argument(
        "--device", default="cuda", help="cuda; on a cpu shapes are tiny, and no claim means much"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each figure")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu"), help="a folder for the results")
    options = parser.parse_args(arguments)
    if options.part is not None and not 1 <= options.part <= len(PARTS):
        parser.error(f"--part must be from 1 to {len(PARTS)}, got {options.part}")
    try:
        device = device_for(KernelCase, options.device)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    parts = {"smoke": SMOKE} if options.what == "smoke" else {
        f"figures-{index}": part for index, part in enumerate(PARTS, 1) if options.part in (None, index)
    }  # fmt: skip
    ends = [check_part(name, part, device, options.repeats, options.out) for name, part in parts.items()]
    return int(not all(ends))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
