"""bench loss: heads are right, measured in processes of their own, and judged where there are bars."""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("typer")

from ranks import processes
from typer.testing import CliRunner

from burst_bench.core import METHODS, Method, World, installed, of_kind
from burst_bench.methods import heads
from burst_bench.results import read
from burst_bench.run import run
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


def _refusing(case, world):
    def refuse(hidden, weight, labels):
        raise RuntimeError("not on a Tuesday\nand more")

    return heads.HeadMethod(refuse)


def _killed(case, world):
    os.kill(os.getpid(), signal.SIGKILL)


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


def _measured(monkeypatch, methods, names):
    for method in methods:
        monkeypatch.setitem(METHODS, ("heads", method.name), method)
    return run(HeadCase, {"small": SMALL}, names, 1, "cpu")


def test_what_cannot_run_gives_its_reason(monkeypatch):
    needs = partial(installed, "no-such", on_gpu=True)
    assert needs(SMALL, "cpu") == "a GPU and the package no-such"
    assert needs(SMALL, "cuda") == "the package no-such"
    assert installed("torch", SMALL, "cuda", on_gpu=True) is None
    methods = [Method("refuses", _refusing), Method("killed", _killed), Method("lacks", _refusing, needs)]
    results = _measured(monkeypatch, methods, ["refuses", "killed", "lacks", "naive"])
    reasons = {entry["method"]: entry["reason"] for entry in results.refused}
    assert reasons == {
        "refuses": "RuntimeError: not on a Tuesday",
        "killed": "its process was ended: too little memory?",
        "lacks": "needs a GPU and the package no-such",
    }
    assert results.tables["small"]["naive", "wall"][0] > 0
