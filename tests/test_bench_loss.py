import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from burst_mcore.bench import head, head_methods, head_report
from burst_mcore.bench.head import Errors, HeadProblem, Row
from burst_mcore.bench.head_memory import LargestMade, peak_bytes
from burst_mcore.bench.head_methods import METHODS, Method
from burst_mcore.cli import app

SMALL = HeadProblem(96, 16, 200)
HERE = [name for name, method in METHODS.items() if method.needs("cpu") is None and not method.compiled]
RIGHT = Errors(loss=1e-7, d_hidden=1e-7, d_weight=1e-7, over="96x16x200")


def _loss_of_twice_the_logits(device):
    return lambda hidden, weight, labels: METHODS["naive"].build(device)(2 * hidden, weight, labels)


def _refuses(device):
    def loss(hidden, weight, labels):
        raise RuntimeError("not on a Tuesday\nand more")

    return loss


def _is_killed(device):
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_command_prints_a_table_and_writes_all_figures(tmp_path, monkeypatch):
    wrong = Method("wrong", _loss_of_twice_the_logits)
    monkeypatch.setitem(METHODS, "wrong", wrong)
    out = tmp_path / "new" / "loss.json"
    line = f"bench loss --device cpu --shape 96x16x200 --dtype float32 --repeats 2 --processes 2 --out {out}"
    done = CliRunner().invoke(app, [*line.split(), "--methods", "burst,naive,torch,liger,wrong"])
    assert done.exit_code == 0, done.output
    title = "96 x 16 x 200 (tokens x hidden x vocabulary), float32, 0.0625 of the tokens masked"
    assert title in done.stdout
    assert "96x16x200, float32, wrong: wrong" in done.stdout
    found = json.loads(out.read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["burst", "naive", "torch", "liger", "wrong"]
    for name in ("burst", "naive", *(["torch"] if METHODS["torch"].needs("cpu") is None else [])):
        row = rows[name]
        assert row["seconds"] > 0
        assert row["of_products"] > 0
        assert len(row["times"]) == len(row["products_times"]) == 4
        assert len(row["ours_times"]) == (0 if name == "burst" else 4)
        assert (row["ours_over"] is None) == (name == "burst")
        assert row["why_not"] is None
        assert 0 < row["errors"]["d_weight"] < 1e-5
        assert row["errors"]["over"] == "96x16x200"
    assert rows["naive"]["largest"] == 1.0
    assert rows["torch"]["largest"] is None
    assert rows["wrong"]["why_not"] == "wrong"
    assert rows["wrong"]["seconds"] is None
    assert rows["wrong"]["errors"]["d_hidden"] > head.WRONG
    assert rows["liger"]["why_not"].startswith("needs a GPU")
    assert found["verdicts"] == found["not judged"] == []  # no bar for this shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", HERE)
def test_every_method_that_runs_here_is_right(name, dtype):
    errors = head._errors(METHODS[name].build("cpu"), replace(SMALL, dtype=dtype), "cpu")
    assert max(errors.loss, errors.d_hidden, errors.d_weight) < (1e-5 if dtype == "float32" else 2e-2)
    assert not errors.wrong


def _measured(method, beside=None):
    return head._measured(method, beside, SMALL, repeats=1, threads=torch.get_num_threads(), device="cpu")


def test_what_cannot_run_gives_its_reason(monkeypatch):
    lacks = Method("lacks", _refuses, partial(head_methods._needs_package, "no_such_module", "no-such", True))
    assert _measured(lacks).why_not == "needs a GPU and the package no-such"
    assert lacks.needs("cuda") == "the package no-such"
    monkeypatch.setattr(head, "ProcessPoolExecutor", lambda size, mp_context: ThreadPoolExecutor(size))
    refuses = _measured(Method("refuses", _refuses))
    assert refuses.why_not == "RuntimeError: not on a Tuesday"
    assert refuses.seconds is refuses.peak_bytes is refuses.errors is None


@pytest.mark.parametrize("fails", [_refuses, _is_killed])
def test_what_fails_beside_a_method_is_not_its_fault(fails):
    torch_like = Method("theirs", METHODS["naive"].build)
    alone = _measured(torch_like, beside=Method("ours", fails))
    assert alone.why_not is None
    assert alone.seconds > 0
    assert alone.ours_over is None
    killed = _measured(Method("killed", fails), beside=torch_like)
    words = "not on a Tuesday" if fails is _refuses else "its process was ended: too little memory?"
    assert words in killed.why_not


@pytest.mark.parametrize(("masked", "least", "most"), [(0.0, 0, 0), (head.MASKED, 2, 14), (0.5, 30, 66)])
def test_so_many_tokens_are_masked(masked, least, most):
    labels = replace(SMALL, masked=masked).tensors("cpu")[2]
    assert least <= (labels == head_methods.IGNORED).sum() <= most
    assert labels[0] != head_methods.IGNORED  # a mean over nothing has no gradient


def test_errors_that_are_not_numbers_are_wrong():
    assert replace(RIGHT, d_hidden=float("nan")).wrong
    assert not RIGHT.wrong


def test_the_three_products_over_parts_are_those_of_the_whole(monkeypatch):
    hidden, weight, _ = (x.detach() for x in SMALL.tensors("cpu"))
    made = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: made.append(empty_like(x)) or made[-1])
    head.three_products(hidden, weight)()
    monkeypatch.setattr(head, "LARGE", 1)
    monkeypatch.setitem(head.PRODUCT_TOKENS, "cpu", 40)
    head.three_products(hidden, weight)()
    torch.testing.assert_close(made[0], hidden @ weight.t() @ weight)
    torch.testing.assert_close(made[1], (hidden @ weight.t()).t() @ hidden)
    torch.testing.assert_close(made[2:], made[:2])


def test_memory_is_what_a_call_takes_beyond_what_is_there():
    given = torch.ones(2**24)
    assert peak_bytes(lambda: None, "cpu") < 2**22
    assert abs(peak_bytes(lambda: (given + 1, given + 2), "cpu") - 2**27) < 2**22
    with LargestMade([given]) as seen:
        made = given[:10].clone().expand(1000, 10)
        given.t()
    assert seen.elements == 10
    assert made.numel() == 10000


def _row(name, **figures):
    return Row(name, "8192x1024x128256", "bfloat16", "cpu", errors=RIGHT, **figures)


def _in_turn(*ours):
    return {"times": (1.0,) * len(ours), "products_times": (0.8,) * len(ours), "ours_times": ours}


def test_what_processes_found_is_joined():
    first = _row("torch", times=(1.0, 3.0), products_times=(1.0, 1.0), ours_times=(2.0, 2.0))
    second = _row("torch", times=(8.0,), products_times=(2.0,), ours_times=(2.0,))
    both = first.joined(second)
    assert (both.seconds, both.products_seconds, both.of_products, both.ours_over) == (3.0, 1.0, 3.0, 2 / 3)
    assert first.joined(replace(second, ours_times=())).ours_over is None  # ours failed beside it
    died = _row("torch", why_not="its process was ended")
    assert first.joined(died) is died
    assert died.seconds is died.of_products is died.ours_over is None


def test_bars_are_for_the_shapes_that_they_name_and_nothing_is_dropped():
    rows = [
        _row("burst", times=(1.0,), products_times=(0.8,), peak_bytes=10, largest=0.1),
        _row("compiled-naive", **_in_turn(0.9, 1.02, 1.5), peak_bytes=40),
        _row("torch", times=(1.6,), products_times=(0.8,), peak_bytes=8),
        _row("deepspeed", why_not="needs the package deepspeed"),
    ]
    judged, left_open = head_report.verdicts(rows)
    at = "8192x1024x128256, bfloat16: "
    assert {v.claim.removeprefix(at): v.reached for v in judged} == {
        "time over the three products alone": True,
        "time over that of compiled-naive, in turn": False,
        "peak memory over that of torch": False,
        "peak memory over that of compiled-naive": True,
        "largest tensor made over N x V, below 1": True,
    }
    assert left_open == [f"{at}peak memory over that of deepspeed"]
    text = head_report.report(rows, judged, left_open)
    assert "needs the package deepspeed" in text
    assert "MISSED" in text
    assert "not judged, since not measured:" in text
    even = [rows[0], replace(rows[1], **_in_turn(0.8, 1.3))]  # the median of their inverses is above 1 too
    assert not next(v for v in head_report.verdicts(even)[0] if "in turn" in v.claim).reached
    faster = [rows[0], replace(rows[1], **_in_turn(0.9, 0.98, 1.5))]
    assert next(v for v in head_report.verdicts(faster)[0] if "in turn" in v.claim).reached
    failed = [_row("burst", why_not="wrong"), faster[1]]
    assert f"{at}time over that of compiled-naive, in turn" in head_report.verdicts(failed)[1]
    alone = [rows[0], replace(rows[1], ours_times=())]
    assert f"{at}time over that of compiled-naive, in turn" in head_report.verdicts(alone)[1]
    whole = [replace(rows[0], largest=1.0)]
    assert not next(v for v in head_report.verdicts(whole)[0] if "largest" in v.claim).reached
    small = [replace(row, shape="96x16x200") for row in rows]
    assert head_report.verdicts(small) == ([], [])
    easier = [replace(row, masked=0.5) for row in rows]
    assert head_report.verdicts(easier) == ([], [])
    lesser = [replace(row, shape="4096x1024x32000") for row in rows]  # there memory has no bar
    assert not any("memory" in v.claim for v in head_report.verdicts(lesser)[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--shape 12x", "a shape is tokens x hidden x vocabulary, as 4096x1024x32000, got '12x'"),
        ("--shape 0x16x200", "must be at least 1, got 0x16x200"),
        ("--dtype int8", "dtype must be one of float32"),
        ("--methods magic", "unknown method 'magic'; legal: burst, naive"),
        ("--device tpu", "no device 'tpu' here"),
        ("--masked 1", "the masked share of tokens must be at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_options_are_one_line(options, words):
    done = CliRunner().invoke(app, ["bench", "loss", *options.split()])
    assert done.exit_code == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_every_method_is_in_the_docs():
    text = (Path(__file__).parent.parent / "docs" / "benchmark.md").read_text()
    assert all(f"`{name}`" in text for name in METHODS)


def test_losses_are_timed_in_turn_forth_and_back():
    order = []

    def loss(which, hidden, weight, labels):
        order.append(which)
        return METHODS["naive"].build("cpu")(hidden, weight, labels)

    clocks = head._times([partial(loss, "first"), partial(loss, "second")], SMALL, 2, "cpu")
    assert order == ["second", "first", "first", "second", "second", "first"]
    assert [len(clock) for clock in clocks] == [2, 2, 2]
