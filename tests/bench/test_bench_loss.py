"""bench loss: heads are right, measured in processes of their own, and judged where there are bars."""

from dataclasses import replace

import pytest

pytest.importorskip("typer")

from ranks import processes
from typer.testing import CliRunner

from burst_bench.core import METHODS, Method, World, of_kind
from burst_bench.methods import heads
from burst_bench.results import read
from burst_bench.subjects import loss
from burst_bench.subjects.loss import HeadCase
from burst_plan.cli import app

HEADS = {method.name: method for method in of_kind("heads")}
SMALL = HeadCase(tokens=96, hidden=16, vocabulary=200, threads=1)
HERE = [name for name in HEADS if HEADS[name].needs(SMALL, "cpu") is None and name != "compiled-naive"]
TEXT = "tokens=96; hidden=16; vocabulary=200; processes=2"


def _of_twice_the_logits(case, world):
    naive = HEADS["naive"].build(case, world).loss
    return heads.HeadMethod(lambda hidden, weight, labels: naive(2 * hidden, weight, labels))


def test_the_command_prints_a_table_and_writes_all_figures(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, ("heads", "wrong"), Method("wrong", _of_twice_the_logits, ours=False))
    out = tmp_path / "new" / "loss.json"
    words = ["--device", "cpu", "--case", TEXT, "--repeats", "2", "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "loss", *words, "--methods", "burst,naive,torch,liger,wrong"])
    assert done.exit_code == 0, done.output
    assert f"{TEXT}: wrong was not timed: wrong: its " in done.stdout
    results = read(out)
    table = results.tables[TEXT]
    for name in ("burst", "naive", *(["torch"] if HEADS["torch"].needs(SMALL, "cpu") is None else [])):
        assert len(table[name, "wall"]) == len(table[name, "products wall"]) == 4
        assert min(table[name, "wall / products"]) > 0
        assert len(table.get((name, "burst wall"), ())) == (0 if name == "burst" else 4)
        assert ((name, "burst / this") in table) == (name != "burst")
        assert 0 < table[name, "d_weight error"][0] < 1e-5
        assert (table[name, "gate tokens"][0], table[name, "gate vocabulary"][0]) == (96, 200)
    assert table["naive", "largest / (N x V)"] == (1.0, 1.0)
    assert ("torch", "largest / (N x V)") not in table
    assert ("wrong", "wall") not in table and table["wrong", "d_hidden error"][0] > loss.WRONG
    reasons = {entry["method"]: entry["reason"] for entry in results.refused}
    assert reasons["liger"].startswith("needs a GPU") and reasons["wrong"].startswith("wrong")
    assert results.bars == results.not_judged == []  # no bar for this shape


def _errors(rank, size, name, dtype):
    case = replace(SMALL, dtype=dtype)
    return loss.errors(HEADS[name].build(case, World(0, 1)).loss, case, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", HERE)
def test_every_method_that_runs_here_is_right(name, dtype):
    errors = processes(1, _errors, name, dtype)[0]
    for meter in ("loss error", "d_hidden error", "d_weight error"):
        assert errors[meter] < (1e-5 if dtype == "float32" else 2e-2)
