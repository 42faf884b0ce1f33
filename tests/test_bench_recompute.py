"""bench recompute: its figures on a small problem, and what it says of wrong or absent methods."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("tabulate")
pytest.importorskip("matplotlib")

from ranks import processes
from typer.testing import CliRunner

from burst_mcore.bench import recompute, recompute_report
from burst_mcore.bench.recompute import Row, shares_recomputed
from burst_mcore.bench.recompute_methods import METHODS, Method, Stack
from burst_mcore.cli import app

SMALL = "bench recompute --seq 512 --hidden 32 --heads 2 --layers 1 --repeats 1"


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_prints_a_table_draws_a_curve_and_writes_all_figures(others, tmp_path, monkeypatch):
    if not others:  # Megatron takes long to import
        monkeypatch.setattr(recompute, "METHODS", [m for m in METHODS if "megatron" not in m.name])
    out = tmp_path / "new" / "recompute.json"
    done = CliRunner().invoke(app, [*SMALL.split(), "--out", str(out)])
    assert "all figures" in done.stdout, done.output  # times of so little may miss the bars
    found = json.loads(out.read_text())
    here = [method.name for method in recompute.METHODS if method.needs() is None]
    assert [row["method"] for row in found["rows"]] == here
    rows = {row["method"]: row for row in found["rows"]}
    assert all(row["cpu_seconds"] > 0 and row["error"] < 1e-4 for row in found["rows"])
    assert rows["none"]["recompute_seconds"] == 0 < rows["full"]["recompute_seconds"]
    assert rows["full"]["attention_flops"] == 2 * rows["none"]["attention_flops"]
    assert rows["attention"]["attention_flops"] == rows["none"]["attention_flops"]
    assert rows["full"]["saved_seconds"] == rows["full"]["predicted_seconds"] == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_flop_model():
    shares = {m.name: shares_recomputed(m, Stack(seq=4096), 2) for m in METHODS}
    want = {"none": 0, "full": 1, "segment 0.25": 0.5625, "segment 0.5": 0.25, "segment 0.75": 0.0625}
    assert {name: shares[name] for name in want} == pytest.approx(want, abs=1e-3)
    assert shares["attention"] == 0 == shares["torch selective"]


def _row(name, saved, predicted):
    return Row(name, 1.0, 1.0, 0.5, saved, predicted, None, 1, 0.0)


def test_verdicts():
    judged = recompute_report.verdicts(
        [_row("none", None, None), _row("full", 0.0, 0.0), _row("near", 0.96, 1.0), _row("far", 1.1, 1.0)]
    )
    assert [(v.claim.split(":")[0], v.reached) for v in judged] == [("near", True), ("far", False)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--seq 511", "--seq must be a multiple of 2"),
        ("--hidden 33 --heads 2", "heads must divide hidden"),
        ("--dtype int8", "dtype must be one of"),
        ("--layout spiral", "unknown layout"),
    ],
)
def test_bad_input(arguments, words):
    done = CliRunner().invoke(app, ["bench", "recompute", *arguments.split()])
    assert done.exit_code == 1
    assert words in done.output


def _wrong(rank, size):
    wrong = Method("doubling", layer=lambda layer, x: 2 * layer(x))
    with pytest.raises(RuntimeError, match=r"doubling is wrong: its gradients are off by \d"):
        recompute._gate(rank, size, [METHODS[1], wrong], Stack(seq=64, hidden=16, heads=2, layers=1))
    return True


def test_a_wrong_method_ends_the_run():
    assert processes(1, _wrong) == [True]
