"""bench loss: heads are right, measured in processes of their own, and judged where there are bars."""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("typer")

from ranks import processes
from typer.testing import CliRunner

from burst_bench.core import METHODS, Method, Table, World, installed, of_kind
from burst_bench.memory import LargestMade, peak_meter
from burst_bench.methods import heads
from burst_bench.results import Results, read
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


@pytest.mark.parametrize("fails", [_refusing, _killed])
def test_what_fails_beside_a_method_is_not_its_fault(fails, monkeypatch):
    results = _measured(monkeypatch, [Method("burst", fails)], ["burst", "naive"])
    table = results.tables["small"]
    assert table["naive", "wall"][0] > 0 and ("naive", "burst wall") not in table
    assert [entry["method"] for entry in results.refused] == ["burst"]


@pytest.mark.parametrize(("masked", "least", "most"), [(0.0, 0, 0), (loss.MASKED, 2, 14), (0.5, 30, 66)])
def test_so_many_tokens_are_masked(masked, least, most):
    labels = replace(SMALL, masked=masked).tensors("cpu")[2]
    assert least <= (labels == heads.IGNORED).sum() <= most
    assert labels[0] != heads.IGNORED  # a mean over nothing has no gradient


def test_the_three_products_over_parts_are_those_of_the_whole(monkeypatch):
    hidden, weight, _ = (x.detach() for x in SMALL.tensors("cpu"))
    made = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: made.append(empty_like(x)) or made[-1])
    loss.three_products(hidden, weight)()
    monkeypatch.setattr(loss, "LARGE", 1)
    monkeypatch.setitem(loss.PRODUCT_TOKENS, "cpu", 40)
    loss.three_products(hidden, weight)()
    torch.testing.assert_close(made[0], hidden @ weight.t() @ weight)
    torch.testing.assert_close(made[1], (hidden @ weight.t()).t() @ hidden)
    torch.testing.assert_close(made[2:], made[:2])


def test_memory_is_what_a_call_takes_beyond_what_is_there():
    given = torch.ones(2**24)
    assert peak_meter(lambda: None, "cpu")["peak"] < 2**22
    assert abs(peak_meter(lambda: (given + 1, given + 2), "cpu")["peak"] - 2**27) < 2**22
    with LargestMade([given]) as seen:
        made = given[:10].clone().expand(1000, 10)
        given.t()
    assert seen.elements == 10
    assert made.numel() == 10000


def _judged(case, **of_methods):
    """{claim: reached}, and the claims left open, of samples by method and meter."""
    results = Results("loss", "", "cpu", 1)
    table = {
        (name.replace("_", "-"), meter): samples
        for name, meters in of_methods.items()
        for meter, samples in meters.items()
    }
    table |= {(m, meter): samples for m, meter, samples in case.derive(Table(table)) if len(samples)}
    results.tables["large"] = Table(table)
    results.judge(HeadCase, {"large": case})
    return {bar.claim: bar.reached for bar in results.bars}, results.not_judged


def _in_turn(*ours):
    ones = (1.0,) * len(ours)
    return {"wall": ones, "products wall": (0.8,) * len(ours), "burst wall": ours}


LARGE = HeadCase(tokens=8192, hidden=1024, vocabulary=128256, dtype="bfloat16")
OURS = {"wall": (1.0,), "products wall": (0.8,), "peak": (10,), "largest / (N x V)": (0.1,)}
IN_TURN = "time over that of compiled-naive, in turn"


def test_bars_are_for_the_shapes_that_they_name_and_nothing_is_dropped():
    compiled = {**_in_turn(0.9, 1.02, 1.5), "peak": (40,)}
    torchs = {"wall": (1.6,), "products wall": (0.8,), "peak": (8,)}
    reached, not_judged = _judged(LARGE, burst=OURS, compiled_naive=compiled, torch=torchs)
    assert reached == {
        "time over the three products alone": True,
        IN_TURN: False,
        "peak memory over that of torch": False,
        "peak memory over that of compiled-naive": True,
        "largest tensor made over N x V, below 1": True,
    }
    assert not_judged == ["large: peak memory over that of deepspeed"]
    even = _judged(LARGE, burst=OURS, compiled_naive=_in_turn(0.8, 1.3))[0]
    assert not even[IN_TURN]  # the median of their inverses is above 1 too
    faster = _judged(LARGE, burst=OURS, compiled_naive=_in_turn(0.9, 0.98, 1.5))[0]
    assert faster[IN_TURN]
    alone = _judged(LARGE, burst=OURS, compiled_naive={"wall": (1.0,), "products wall": (0.8,)})
    assert f"large: {IN_TURN}" in alone[1]
    whole = _judged(LARGE, burst={**OURS, "largest / (N x V)": (1.0,)})[0]
    assert not whole["largest tensor made over N x V, below 1"]


def test_other_shapes_and_more_masked_tokens_have_no_bars():
    assert _judged(replace(LARGE, tokens=96), burst=OURS) == ({}, [])
    assert _judged(replace(LARGE, masked=0.5), burst=OURS) == ({}, [])
    lesser = replace(LARGE, tokens=4096, vocabulary=32000)  # there memory has no bar
    assert not any("memory" in claim for claim in _claims(lesser, "cpu"))
    assert _claims(replace(LARGE, tokens=4096, hidden=4096), "cpu") == []
    on_gpu = _claims(replace(LARGE, tokens=4096, hidden=4096), "cuda")
    assert "time over that of liger, in turn" in on_gpu and "time over that of cce, in turn" in on_gpu


def _claims(case, device):
    return [bar.claim for bar in case.bars(device)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--case", "tokens=12x"], "tokens must be int, got '12x'"),
        (["--case", "tokens=0"], "tokens must be at least 1, got 0"),
        (["--case", "dtype=int8"], "dtype must be one of float32"),
        (["--methods", "magic"], "unknown method 'magic'; legal: burst, naive"),
        (["--device", "tpu"], "no device 'tpu' here"),
        (["--case", "masked=1.0"], "the masked share of tokens must be at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_options_are_one_line(words, error):
    done = CliRunner().invoke(app, ["bench", "loss", *words])
    assert done.exit_code == 2
    assert error in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
