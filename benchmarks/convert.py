"""Converts the committed results of the seven former programs to the one schema; run once, then removed.

    python benchmarks/convert.py

Commit and machine stay those that made the figures. Every number of the old files must be in the new ones:
the script fails otherwise.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from burst_mcore.bench.core import ALL, Figure
from burst_mcore.bench.results import Results
from burst_mcore.bench.subjects import SUBJECTS, loss, topology

FOLDER = Path(__file__).parent / "results"
MEDIANS = "samples are medians: single rounds were not recorded"


class Conversion:
    """New results, filled figure by figure."""

    def __init__(self, subject: str, repeats: int | None) -> None:
        self.subject = SUBJECTS[subject]
        self.results = Results(subject, self.subject.about, "cpu", repeats)
        self.cases: dict[str, Any] = {}

    def case(self, name: str, case: Any) -> str:
        self.cases[name], self.results.cases[name] = case, asdict(case)
        return name

    def add(self, case: str, method: str, **meters: Any) -> None:
        for meter, samples in meters.items():
            self.put(case, method, meter, samples)

    def put(self, case: str, method: str, meter: str, samples: Any) -> None:
        if samples is None or samples == []:
            return
        samples = samples if isinstance(samples, list) else [samples]
        self.results.figures.append(Figure(case, method, meter, tuple(samples)))

    def refuse(self, case: str, method: str, reason: str) -> None:
        self.results.refused.append({"case": case, "method": method, "reason": reason})


def _masks(old: Any) -> Conversion:
    new = Conversion("masks", None)
    new.results.notes += [MEDIANS]
    for (name, case), row in zip(new.subject.cases("cpu").items(), old["rows"], strict=True):
        assert (case.seq, case.ideal) == (row["tokens"], row["ideal"]) and name.startswith(row["mask"])
        new.case(name, case)
        new.add(name, "burst", cpu=row["burst"])
        new.put(name, "burst", "cpu / tiles", row["of_tiles"])
        new.put(name, "burst", "cpu / tiles, sharing", row["of_tiles_shared"])
        new.put(name, "burst", "masked dense / this", row["times_faster"])
        new.put(name, "burst", "cpu a pair / dense", row["per_pair"])
        new.put(name, "plan", "busiest / mean", row["imbalance"])
        for meter, key in (("sent", "forward_mb"), ("all-gather", "all_gather_mb"), ("least", "least_mb")):
            new.put(name, "plan", meter, row[key] * 1e6)
        new.results.notes.append(f"{name}: the way was {row['way']}, the layout {row['layout']}")
    return new


def _planning(old: Any) -> Conversion:
    new = Conversion("planning", 3)
    new.results.notes += [MEDIANS]
    cases = new.subject.cases("cpu")
    for row in old["rows"]:
        name = f"{row['planned']}, {row['ranks']} ranks"
        new.case(name, cases[name])
        new.add(name, "burst", cpu=row["seconds"], peak=row["megabytes"] * 1e6)
    return new


def _recompute(old: Any) -> Conversion:
    new = Conversion("recompute", old["repeats"])
    new.results.notes += [MEDIANS]
    name, *_ = new.subject.cases("cpu")
    new.case(name, new.subject.case(**old["what"], ranks=old["ranks"]))
    for row in old["rows"]:
        method = row["method"]
        new.add(name, method, peak=row["peak_bytes"], error=row["error"], cpu=row["cpu_seconds"])
        new.add(name, method, wall=row["wall_seconds"], recomputing=row["recompute_seconds"])
        new.put(name, method, "attention forward flops", row["attention_flops"])
        new.add(name, method, saved=row["saved_seconds"], predicted=row["predicted_seconds"])
        if row["predicted_seconds"]:
            off = abs(row["saved_seconds"] / row["predicted_seconds"] - 1)
            new.put(name, method, "off the FLOP model", off)
    return new


def _training(old: Any) -> Conversion:
    new = Conversion("training", 25)
    new.results.notes += [MEDIANS]
    for (name, case), rows in zip(new.subject.cases("cpu").items(), old["cases"].values(), strict=True):
        new.case(name, case)
        for row in rows:
            method = row["method"].replace("auto, fused", "auto with fused")
            if row["seconds"] is None:
                new.refuse(name, method, row["cannot"])
            new.add(name, method, wall=row["seconds"], written=row["written_bytes"], peak=row["peak_bytes"])
            new.put(name, method, "wall / ulysses", row["over_ulysses"])
            new.put(name, method, "first loss", row["loss"])
    return new


def _head(old: Any) -> Conversion:
    sets, repeats = (
        re.search(pattern, old["what"])
        for pattern in (r"processes \((\d+)\)", r"(\d+) times|medians of (\d+)")
    )
    new = Conversion("loss", int(next(x for x in repeats.groups() if x)))
    in_turn = "times" in old["rows"][0]
    if not in_turn:
        new.results.notes += [MEDIANS, "burst / this is the ratio of two processes' wall / products here"]
    ours: dict[str, Any] = {}
    for row in old["rows"]:
        n, d, v = map(int, row["shape"].split("x"))
        name = f"{row['shape']}, {row['dtype']}" + ("" if row["masked"] else ", none masked")
        case = loss.HeadCase(
            tokens=n, hidden=d, vocabulary=v, dtype=row["dtype"], masked=row["masked"], threads=2,
            processes=int(sets[1]) if sets else 1,
        )  # fmt: skip
        new.case(name, case)
        method, errors = row["method"], row["errors"] or {}
        if method == "burst":
            ours[name] = row
        if row["why_not"]:
            new.refuse(name, method, row["why_not"])
        new.put(name, method, "peak", row["peak_bytes"])
        new.put(name, method, "largest / (N x V)", row["largest"])
        for meter in ("loss", "d_hidden", "d_weight"):
            new.put(name, method, f"{meter} error", errors.get(meter))
        if errors:
            tokens, _, vocabulary = map(int, errors["over"].split("x"))
            new.put(name, method, "gate tokens", tokens)
            new.put(name, method, "gate vocabulary", vocabulary)
        new.put(name, method, "wall", row["times"] if in_turn else row["seconds"])
        new.put(name, method, "products wall", row["products_times"] if in_turn else row["products_seconds"])
        if in_turn:
            new.put(name, method, "burst wall", row["ours_times"])
            pairs = zip(row["times"], row["products_times"], strict=True)
            new.put(name, method, "wall / products", [a / b for a, b in pairs])
            pairs = zip(row["ours_times"], row["times"], strict=False)
            new.put(name, method, "burst / this", [a / b for a, b in pairs])
        else:
            new.put(name, method, "wall / products", row["of_products"])
            mine = ours[name]["of_products"]
            if method == "compiled-naive" and row["of_products"]:
                new.put(name, method, "burst / this", mine / row["of_products"])
        if method != "burst" and row["peak_bytes"]:
            new.put(name, method, "burst peak / this", ours[name]["peak_bytes"] / row["peak_bytes"])
    return new


def _cluster(old: Any) -> Conversion:
    new = Conversion("topology", 3)
    new.results.notes += [MEDIANS]
    for verdict in old["verdicts"]:
        cells: list[list[Any]] = []
        for row in verdict["timings"]:
            if row["ring"] == "auto" or not cells:
                cells.append([])
            cells[-1].append(row)
        ratios = [_cell(new, verdict["claim"], rows) for rows in cells]
        if verdict["claim"] == "choice":
            share = sum(ratio <= topology.WITHIN for ratio in ratios) / len(ratios)
            new.put(ALL, topology.AUTO, "right choices / cells", share)
    return new


def _cell(new: Conversion, claim: str, rows: list[Any]) -> float:
    first = rows[0]
    nodes, intra = map(int, first["cluster"].split(" x "))
    heads, kv_heads = map(int, first["heads"].split(":"))
    kernel = first["kernel GFLOP/s"]
    ways = {_way(row, claim): row for row in rows}
    case = topology.ClusterCase(
        nodes=nodes, intra=intra, intra_rate=first["intra MB/s"] * 1e6, inter_rate=first["inter MB/s"] * 1e6,
        compute=topology.FREE if kernel is None else kernel * 1e9, heads=heads, kv_heads=kv_heads,
        tokens=first["tokens a rank"], head_dim=first["head_dim"], mask=first["mask"],
        ways="" if claim == "choice" else " | ".join(ways),
    )  # fmt: skip
    name = claim
    if claim == "choice":
        rates = f"{first['intra MB/s']:g} and {first['inter MB/s']:g} MB/s"
        compute = "0" if kernel is None else "0.5"
        name = f"2 x {intra}, {rates}, heads {first['heads']}, compute {compute}"
        known = new.subject.cases("cpu")[name]
        assert math.isclose(known.compute, case.compute, rel_tol=1e-12), (known, case)
        assert set(topology._ways(case)) == set(ways), (topology._ways(case), list(ways))
    new.case(name, case)
    new.put(name, "message", "hop", first["latency us"] / 1e6)
    for way, row in ways.items():
        assert row["latency us"] == first["latency us"]
        new.put(name, way, "wall", row["measured ms"] / 1e3)
        new.put(name, way, "predicted", row["predicted ms"] / 1e3)
        new.put(name, way, "wall / predicted", row["measured ms"] / row["predicted ms"])
    walls = {way: row["measured ms"] for way, row in ways.items()}
    for slow in (topology.FLAT, topology.OFF):
        if slow in walls:
            new.put(name, topology.DOUBLE, f"{slow} / this", walls[slow] / walls[topology.DOUBLE])
    if claim != "choice":
        return 0.0
    ratio = walls[topology.AUTO] / min(wall for way, wall in walls.items() if way != topology.AUTO)
    new.put(name, topology.AUTO, "wall / fastest", ratio)
    return float(ratio)


def _way(row: Any, claim: str) -> str:
    if claim == "choice":
        return f"ring={row['ring']}; head_parallel={row['head_parallel']}; backward={row['backward']}"
    return f"ring={row['ring']}; backward={row['backward']}" + ("" if row["overlap"] else "; overlap=False")


def made_by(old: Any) -> dict[str, Any]:
    """As the old file has it; versions were part of its machine."""
    words = old["machine"].split(", ")
    versions = {w.split()[0].lower(): w.split()[1] for w in words if re.match(r"(Python|torch) \d", w)}
    machine = ", ".join(w for w in words if not re.match(r"(Python|torch) \d", w))
    return {"commit": old["commit"], "machine": machine, "versions": versions}


def numbers(x: Any) -> Iterator[float]:
    """All numbers in a file, but for those in texts."""
    if isinstance(x, dict):
        for value in x.values():
            yield from numbers(value)
    elif isinstance(x, list):
        for value in x:
            yield from numbers(value)
    elif isinstance(x, int | float) and not isinstance(x, bool):
        yield float(x)


def check(old: Any, new: Any) -> int:
    """How many numbers of the old file the new one has; fails where one is missing."""
    there = sorted(set(numbers(new)))
    total = count()
    for number in numbers(old):
        scaled = [number * scale for scale in (1, 1e6, 1e9, 1e-3, 1e-6)]
        if not any(math.isclose(number, x, rel_tol=1e-12) for number in scaled for x in there):
            raise ValueError(f"{number} is lost")
        next(total)
    return next(total)


FILES = {
    "masks.json": (_masks, "masks.json"),
    "planning.json": (_planning, "planning.json"),
    "recompute.json": (_recompute, "recompute.json"),
    "deepspeed.json": (_training, "training.json"),
    "topology.json": (_cluster, "topology.json"),
    **{path.name: (_head, path.name) for path in sorted(FOLDER.glob("loss*.json"))},
}


def main() -> None:
    """Convert every file, and check each."""
    for name, (convert, renamed) in FILES.items():
        old = json.loads(subprocess.check_output(["git", "show", f"dd551ab:benchmarks/results/{name}"]))
        new = convert(old)
        new.results.judge(new.subject, new.cases)
        text = new.results.as_json(made_by(old))
        kept = check(old, json.loads(text))
        (FOLDER / renamed).write_text(text)
        bars = sum(bar.reached for bar in new.results.bars), len(new.results.bars)
        before = list(old.get("verdicts", ()))
        reached = sum(v["reached"] for v in before), len(before)
        print(f"{name} -> {renamed}: {kept} numbers; bars reached {bars}, before {reached}")


if __name__ == "__main__":
    main()
