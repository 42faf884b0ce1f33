"""bench recompute: its figures on a small problem, and what it says of wrong or absent methods."""

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_bench.core import of_kind
from burst_bench.results import read
from burst_bench.subjects.recompute import LayersCase
from burst_plan.cli import app

LAYERS = {method.name: method for method in of_kind("layers")}
SMALL = "seq=512; hidden=32; heads=2; layers=1"


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_prints_a_table_and_writes_all_figures(others, tmp_path):
    here = [name for name, method in LAYERS.items() if method.needs(None, "cpu") is None]
    if not others:  # Megatron takes long to import
        here = [name for name in here if "megatron" not in name]
    out = tmp_path / "new" / "recompute.json"
    words = ["--case", SMALL, "--repeats", "1", "--out", str(out), "--methods", ",".join(here)]
    done = CliRunner().invoke(app, ["bench", "recompute", *words])
    assert "all figures" in done.stdout, done.output  # times of so little may miss the bars
    results = read(out)
    assert results.refused == results.errors == []
    table = {key: samples[0] for key, samples in results.tables[SMALL].items()}
    for name in here:
        assert table[name, "cpu"] > 0 and table[name, "error"] < 1e-4 and table[name, "peak"] >= 0
    assert table["none", "recomputing"] == 0 < table["full", "recomputing"]
    flops = {name: table[name, "attention forward flops"] for name in here}
    assert flops["full"] == 2 * flops["none"] and flops["attention"] == flops["none"]
    assert table["full", "saved"] == table["full", "predicted"] == 0
    assert len(results.bars) == 4 and not results.not_judged


def test_the_flop_model():
    case = LayersCase(seq=4096)
    shares = {name: case.share_recomputed(name) for name in LAYERS}
    want = {"none": 0, "full": 1, "segment 0.25": 0.5625, "segment 0.5": 0.25, "segment 0.75": 0.0625}
    assert {name: shares[name] for name in want} == pytest.approx(want, abs=1e-3)
    assert shares["attention"] == 0 == shares["torch selective"]
    assert shares["megatron full"] == 1 == shares["megatron selective"]
