"""The picture and the table of a GPU's results, from figures that are made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "plot.py"
FIGURES = [
    {
        "what": "forward",
        "value": 0.97,
        "spread": 0.01,
        "unit": "",
        "bar": 0.95,
        "at_most": False,
        "reached": True,
    },
    {
        "what": "copies",
        "value": 1.05,
        "spread": 0.02,
        "unit": "",
        "bar": 1.03,
        "at_most": True,
        "reached": False,
    },
    {
        "what": "kernel",
        "value": 600,
        "spread": 0.0,
        "unit": "TFLOP/s",
        "bar": None,
        "at_most": False,
        "reached": None,
    },
]


def test_the_picture_and_the_table(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("plot", SCRIPT)
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    results = tmp_path / "some-gpu.json"
    errors = [{"group": "ring of 8", "error": "RuntimeError: gone"}]
    results.write_text(json.dumps({"figures": FIGURES, "errors": errors}))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(results)])
    plot.main()
    printed = capsys.readouterr().out
    assert "failed, and not in the table: ring of 8: RuntimeError: gone" in printed
    assert "| forward | 0.97  | 1.0% | >= 0.95 | reached |" in printed
    assert "| copies | 1.05  | 2.0% | <= 1.03 | missed |" in printed
    assert "| kernel | 600 TFLOP/s | 0.0% |  |  |" in printed
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
