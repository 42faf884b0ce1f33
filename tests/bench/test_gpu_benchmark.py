"""Subjects of the bench for a GPU, with small tensors on the CPU: all but what only a GPU does."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from burst_bench.check.__main__ import as_text, judged
from burst_bench.check.__main__ import main as check
from burst_bench.check.parts import PARTS, SMOKE, Check
from burst_bench.core import Bar, Table
from burst_bench.results import Results, read
from burst_bench.subjects.kernels import KernelCase
from burst_mcore.attention.kernels.triton import interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton compiles here: see tests/gpu")

ROOT = Path(__file__).parents[2]
SMALL = "tokens=64; heads=2; head_dim=16"


def test_it_needs_torch_alone(tmp_path):
    """A checkout with torch, triton and numpy measures a GPU: no package of the command is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('typer', 'tabulate', 'matplotlib'):\n    sys.modules[name] = None\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "burst_bench", "rowwise", "--case", SMALL, "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "r.json")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "r.json").tables[SMALL]["merge of 8", "GB/s"]


def test_the_gpu_check_runs_whole_and_prints_a_line_for_each_claim(tmp_path, capsys):
    """On a CPU with tiny shapes: the way through, not the figures."""
    for what, parts in (("smoke", {"smoke": SMOKE}), ("figures", dict(enumerate(PARTS, 1)))):
        check([what, "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)])
        lines = capsys.readouterr().out.splitlines()
        claims = [bar for part in parts.values() for each in part for bar in each.claims]
        assert [line.split(": ")[0] for line in lines] == [bar.claim.split(": ")[0] for bar in claims]
        for bar, line in zip(claims, lines, strict=True):
            measured = ": ok" in line and "measured" in line
            lacking = {"liger": "needs a GPU", "cce": "needs a GPU", "cudnn": "not on cuda"}
            assert measured or lacking.get(bar.method, "nothing") in line, line
            assert bar.predicted is None or not measured or "predicted" in line
        for name in parts:
            path = tmp_path / (f"figures-{name}.json" if what == "figures" else "smoke.json")
            written = json.loads(path.read_text())
            assert written["commit"] and len(written["claims"]) == sum(
                len(each.claims) for each in parts[name]
            )


def test_a_claim_is_judged_by_its_bar_on_a_gpu_alone():
    speed = Bar("speed", "ours", "x", 0.8, at_most=False, predicted=0.9)
    one = Check("case", KernelCase(), (speed, replace(speed, at_most=True), replace(speed, bound=None)))
    for device, verdicts in (("cuda", [False, True, True]), ("cpu", [True, True, True])):
        results = Results("kernels", "", device, 1, tables={"case": Table({("ours", "x"): (0.7,)})})
        lines = [line for _, line in judged(one, results)]
        assert [line["ok"] for line in lines] == verdicts and {line["measured"] for line in lines} == {0.7}
    (found, *_) = judged(
        one, Results("kernels", "", "cpu", 1, errors=[{"case": "case", "error": "no kernel"}])
    )
    assert as_text(*found) == "speed: not measured (no kernel)"
    assert found[1]["ok"] is False and found[1]["measured"] is None
