"""The picture and the table of results, from figures that are made up."""

import sys

import pytest

pytest.importorskip("matplotlib")

from burst_bench import report
from burst_bench.core import Bar, Table
from burst_bench.results import Results

RESULTS = Results(
    "virtual-ring",
    "about",
    "cuda",
    3,
    {"ring of 8": {}},
    {
        "ring of 8": Table(
            {
                ("burst", "kernel / this"): (0.96, 0.97, 0.98),
                ("burst", "around kernels / whole"): (1.05, 1.05, 1.05),
                ("kernel alone", "backward TFLOP/s"): (600.0,),
            }
        )
    },
    errors=[{"case": "ring of 16", "error": "RuntimeError: gone"}],
    bars=[
        Bar("both", "burst", "kernel / this", 0.92, False, "ring of 8", 0.97),
        Bar("around", "burst", "around kernels / whole", 1.03, True, "ring of 8", 1.05),
    ],
)


def test_the_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "some-gpu.json"
    path.write_text(RESULTS.as_json({"commit": "", "machine": "", "versions": {}}))
    monkeypatch.setattr(sys, "argv", ["report", str(path)])
    report.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "ring of 16 failed: RuntimeError: gone" in lines
    assert "| | kernel / this | around kernels / whole | backward TFLOP/s |" in lines
    assert "| burst | 0.97 +-1% | 1.05 | |" in lines
    assert "| kernel alone | | | 600 |" in lines
    assert "| ring of 8 | both | 0.97 | >= 0.92 | reached |" in lines
    assert "| ring of 8 | around | 1.05 | <= 1.03 | MISSED |" in lines


def test_a_curve_has_a_point_for_each_method(tmp_path):
    figures = {(m, meter): (x,) for m, x in (("one", 1.0), ("two", 2.0)) for meter in ("peak", "cpu")}
    table = Table({**figures, ("three", "cpu"): (1.0,)})
    results = Results("recompute", "", "cpu", 1, {"a": {}}, {"a": table})
    report.save_curve(results, ("peak", "cpu"), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
