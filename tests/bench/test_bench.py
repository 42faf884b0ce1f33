"""The runner of the bench: gates, clocks, results and the command, on attention and masks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import processes

pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_bench import gate, report
from burst_bench.core import METHODS, Bar, Method, Table, World, of_kind
from burst_bench.methods.attention import RingCase, ShardedAttention
from burst_bench.results import Results, read, unit_of
from burst_bench.run import run
from burst_bench.subjects import SUBJECTS, attention
from burst_plan.cli import app

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
SMALL = RingCase(seq=96, heads=6, kv_heads=3, head_dim=16)
MASKS = [
    "causal",
    "full",
    "causal & window:20",
    "dilated:40,3",
    "causal & documents:random,5",
    "blocks:8,0.3",
]


PAIRED = {"burst-auto-hidden", "double-ring", "usp"}
"""Methods that pair ranks, of four at least."""
ANY_MASK = {method.name for method in of_kind("attention") if method.ours} | {"deepspeed-ulysses"}
"""The others are those of tests/bench/test_peers.py."""


def _bench(*words):
    return CliRunner().invoke(app, ["bench", *words])


def _gates(rank, size):
    world = World(rank, size)
    found = {}
    for mask in MASKS:
        case = replace(SMALL, mask=mask, ranks=size, heads=2 * size, kv_heads=size)
        for name in ANY_MASK:
            method = METHODS["attention", name]
            if method.needs(case, "cpu") is None:
                found[name, mask] = gate.error(case, method.build(case, world), world)
    return found


@pytest.mark.parametrize(("size", "absent"), [(1, PAIRED), (3, PAIRED), (4, set())])
def test_every_method_passes_its_gate_with_every_mask(size, absent):
    for errors in processes(size, _gates):
        assert set(errors) == {(name, mask) for name in ANY_MASK - absent for mask in MASKS}
        assert all(0 < error <= gate.BOUND for error in errors.values())


def _wrong_attention(case, world):
    return ShardedAttention("zigzag", world, lambda q, k, v: q * v.mean() + k)


def _failing(case, world):
    raise RuntimeError("not on a Tuesday\nand more")


def test_a_wrong_method_is_not_timed_and_one_that_fails_is_no_others_fault(monkeypatch):
    for method in (Method("wrong", _wrong_attention), Method("fails", _failing)):
        monkeypatch.setitem(METHODS, ("attention", method.name), method)
    case = attention.AttentionCase(ranks=2, seq=96, heads=2, head_dim=16)
    results = run(SUBJECTS["attention"], {"small": case}, ["wrong", "fails", "burst"], 1, "cpu")
    reasons = {entry["method"]: entry["reason"] for entry in results.refused}
    assert re.fullmatch(r"wrong: its error is [\d.e+]+, which may be 2", reasons["wrong"])
    assert reasons["fails"] == "RuntimeError: not on a Tuesday"
    table = results.tables["small"]
    assert table["burst", "wall"][0] > 0 and table["wrong", "error"][0] > 2
    assert ("wrong", "wall") not in table
    assert [error["error"].split(":")[0] for error in results.errors] == ["wrong", "fails"]  # as if ours


def test_the_command_prints_tables_and_writes_all_figures(tmp_path):
    out = tmp_path / "new" / "attention.json"
    words = ["--methods", "burst,ring", "--repeats", "2", "--out", str(out)]
    cases = [f"ranks={ranks}; seq=128; heads=2; head_dim=16; mask=causal & window:64" for ranks in (1, 2)]
    done = _bench("attention", *words, "--case", cases[0], "--case", cases[1])
    assert done.exit_code == 0, done.output
    assert "cpu / kernel" in done.stdout and str(out) in done.stdout
    results = read(out)
    assert [*results.cases] == cases and results.cases[cases[1]]["mask"] == "causal & window:64"
    for case in cases:
        table = results.tables[case]
        for name in ("burst", "ring", "kernel"):
            assert len(table[name, "cpu"]) == len(table[name, "wall"]) == 2 and min(table[name, "cpu"]) > 0
        assert 0 < table["burst", "error"][0] <= 2
        ratios = [a / b for a, b in zip(table["burst", "cpu"], table["kernel", "cpu"], strict=True)]
        assert table["burst", "cpu / kernel"] == pytest.approx(ratios)
    whole = json.loads(out.read_text())
    assert {"schema", "subject", "about", "commit", "machine", "versions", "device", "repeats"} <= set(whole)
    assert whole["versions"]["torch"] == torch.__version__


class Judged(attention.AttentionCase):
    overall = (Bar("all", "burst", "cpu", 1.0),)

    def bars(self, device):
        return [Bar("low", "burst", "cpu", 2.0), Bar("high", "burst", "cpu", 2.0, at_most=False)]


def test_bars_judge_medians_and_a_missing_figure_is_told():
    tables = {"a": Table({("burst", "cpu"): (1.0, 9.0, 1.5)})}
    fields = {"heads": 4, "dtype": "float32", "of": []}
    results = Results("attention", "", "cpu", 3, {"a": fields}, tables)
    results.judge(Judged, {"a": Judged()})
    assert [(bar.claim, bar.value, bar.reached) for bar in results.bars] == [
        ("low", 1.5, True),
        ("high", 1.5, False),
    ]
    assert results.not_judged == ["all cases: all"]
    text = report.report(results)
    assert text.startswith("a\nheads=4; dtype=float32\n|       |")
    assert "MISSED" in text and "not judged, since not measured: all cases: all" in text
    meters = ("cpu", "products wall", "cpu / tiles", "peak", "backward TFLOP/s", "error")
    assert [unit_of(meter) for meter in meters] == ["s", "s", "x", "B", "TFLOP/s", ""]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_committed_results_say_the_commit_the_machine_and_bars_that_follow(file):
    whole, results = json.loads(file.read_text()), read(file)
    commit = whole["commit"]
    assert re.fullmatch("[0-9a-f]{12}", commit) or re.search("committed with [0-9a-f]{7,}$", commit)
    assert "cores" in whole["machine"] and isinstance(whole["versions"], dict)
    subject = SUBJECTS[results.subject]
    cases = {name: subject(**fields) for name, fields in results.cases.items()}
    recorded, open_ = results.bars, results.not_judged
    results.judge(subject, cases)
    assert (results.bars, results.not_judged) == (recorded, open_)
    assert recorded or not any(case.bars(results.device) for case in cases.values())
    assert [bar["reached"] for bar in whole["bars"]] == [bar.reached for bar in recorded]
    for refused in results.refused:  # what was not timed has no times
        table = results.tables[refused["case"]]
        assert not {(refused["method"], meter) for meter in ("cpu", "wall")} & table.keys(), refused
