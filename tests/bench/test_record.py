"""Rows of measurements: `bench attention --record FILE`, by torchrun too, then `plan --against FILE`."""

import json

import pytest
from ranks import torchrun
from typer.testing import CliRunner

from burst_bench.core import of_kind
from burst_bench.published.methods import METHODS, NOT_MODELLED
from burst_mcore.rates import Rates
from burst_plan.cli import app

CASE = "ranks=2; seq=256; heads=4; head_dim=16"
RATES = Rates(intra=1e9, inter=1e8, compute=5e10, latency=1e-4, hidden=False)


def _run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def _rows(*words):
    done = _run("plan", "--against", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])["rows"]


def test_rows_of_a_run_are_read_and_predicted(tmp_path):
    file, out, rates = (tmp_path / name for name in ("rows.json", "a.json", "rates.json"))
    for passes, methods in (("fwd+bwd", "burst,ring,torch-gather,torch-ring"), ("fwd", "ring")):
        case = f"{CASE}; passes={passes}"
        words = ["--methods", methods, "--repeats", "2", "--out", out, "--record", file]
        done = _run("bench", "attention", "--case", case, *words)
        assert done.exit_code == 0 and f"--against {file}" in done.output, done.output
    walls = {f["method"]: f["median"] for f in json.loads(out.read_text())["figures"] if f["meter"] == "wall"}
    RATES.save(rates)
    unknown, known = _rows(file), _rows(file, "--rates", rates)
    assert [(row["method"], row["passes"]) for row in known] == [
        ("ring", "fwd+bwd"), ("all-gather", "fwd+bwd"), ("ring", "fwd+bwd"), ("ring", "fwd"),
    ]  # fmt: skip
    pairs = 256 * 257 / 2
    flops = 4 * pairs * 4 * 16 / 2 / 1e12
    assert known[-1]["measured"] == pytest.approx(flops / walls["ring"], rel=1e-3)
    assert all(row["predicted"] > 0 and "why" not in row for row in known)
    assert all(row["predicted"] is None and "give --rates FILE" in row["why"] for row in unknown)
    assert {(row["hardware"], row["gpus"], row["gpus_per_node"], row["dtype"]) for row in known} == {
        ("cpu", 2, 2, "float32")
    }


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path):
    file, out = tmp_path / "rows.json", tmp_path / "a.json"
    bench = "-m burst_bench attention --device cpu --methods ring,te-p2p,te-a2a --repeats 1".split()
    case = "seq=128; heads=2; head_dim=16"
    done = torchrun(2, *bench, "--case", case, "--out", out, "--record", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("te-p2p", "te-a2a"):
        assert done.stdout.count(f"2 ranks: {name}") == 0  # the case has the name of its fields
        assert done.stdout.count(f"{name} was not timed: needs a GPU for each rank") == 1
    (row,) = json.loads(file.read_text())
    assert (row["method"], row["gpus"], row["gpus_per_node"]) == ("ring", 2, 2)
    three = torchrun(2, *bench, "--case", "ranks=3; seq=96", cwd=tmp_path)
    assert three.returncode == 1 and "torchrun started 2 ranks, and 'ranks=3; seq=96' wants 3" in three.stderr


def test_every_word_of_a_method_is_one_that_predictions_know():
    rows = [method.row for method in of_kind("attention") if method.row]
    assert len(rows) > 12
    assert {row["method"] for row in rows} <= METHODS.keys() | NOT_MODELLED.keys()
    assert {row["method"] for row in rows} >= set(METHODS) - {"loongtrain"}
