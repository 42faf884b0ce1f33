"""benchmarks/gpu.py with small tensors on the CPU and its clock: all but what only a GPU does."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from burst_mcore.attention.kernels.triton import interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interpreted(), reason="Triton compiles here: see tests/gpu")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
SMALL = {"DEVICE": "cpu", "HEADS": 2, "DIM": 16, "HIDDEN": 16, "VOCABULARY": 64}


def _timed(*runs, repeats, ahead=False):
    found = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, found, strict=True):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
    return found


@pytest.fixture
def gpu(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "gpu_benchmark", module)  # dataclasses look for it there
    spec.loader.exec_module(module)
    for name, value in {**SMALL, "timed": _timed}.items():
        monkeypatch.setattr(module, name, value)
    return module


def _run(gpu, monkeypatch, out):
    """(exit status, the results) of the whole script."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tokens", "128", "--repeats", "2", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return ended.value.code, json.loads(out.read_text())


def test_it_measures_all_that_it_says(gpu, monkeypatch, tmp_path):
    status, results = _run(gpu, monkeypatch, tmp_path / "results.json")
    assert (status, results["errors"], results["kernels"]) == (0, [], ["aten-cpu"])
    assert "not on cuda" in results["kernels that are not here"]["cudnn"]
    assert {"burst_mcore", "torch", "triton", "driver"} <= set(results["versions"])
    figures = {figure["what"]: figure for figure in results["figures"]}
    assert len(figures) == len(results["figures"])
    for size, tokens in ((1, 128), (2, 128), (4, 128), (8, 128), (16, 64), (32, 64), (64, 32)):
        where = f"aten-cpu, ring of {size}, {tokens} local tokens, from device, query"
        for what in ("both of the kernel's speed", "share of the time around the kernels", "backward"):
            assert figures[f"{where}: {what}"]["value"] > 0
            assert figures[f"{where}: {what}"]["bar"] is None  # too small to judge
    assert figures["triton over aten-cpu, causal forward"]["bar"] == 0.70
    assert figures["triton over aten-cpu, 3/4 of the blocks empty, both ways"]["bar"] == 1.0
    assert set(results["seconds"]) >= {"aten-cpu runs", "triton runs", "ring of 8, from host, kv"}


def test_a_group_that_fails_costs_no_other(gpu, monkeypatch, tmp_path):
    out, at_each_ring = tmp_path / "results.json", []

    def fail(*args):
        raise RuntimeError("out of luck\nand more")

    def ring(*args):
        at_each_ring.append(json.loads(out.read_text()))
        return []

    monkeypatch.setattr(gpu, "sparse", fail)
    monkeypatch.setattr(gpu, "ring", ring)
    status, results = _run(gpu, monkeypatch, out)
    assert status == 1
    assert results["errors"] == [{"group": "triton, blocks", "error": "RuntimeError: out of luck"}]
    assert results["figures"] and at_each_ring[0]["figures"] == results["figures"]  # written by then


def test_a_kernel_that_fails_is_left_out(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "stock_kernels", lambda: {"aten-cpu": None, "cudnn": None})
    monkeypatch.setattr(gpu, "rings", lambda tokens: [(2, 64, "device", "query")])
    status, results = _run(gpu, monkeypatch, tmp_path / "results.json")
    assert status == 1 and [error["group"] for error in results["errors"]] == ["cudnn runs"]
    assert any(figure["what"].startswith("aten-cpu, ring of 2") for figure in results["figures"])


@pytest.mark.parametrize(("reachable", "bar"), [(True, 1e-9), (False, None)])
def test_bars_of_a_ring_of_8(gpu, monkeypatch, reachable, bar):
    monkeypatch.setattr(gpu, "LOCAL_TOKENS", 32)
    monkeypatch.setattr(gpu, "TFLOPS", 1e-9 if reachable else 1e9)
    found = gpu.ring(8, 32, "device", "kv", lambda: "aten-cpu", 1)
    bars = {figure.what.split(": ")[1]: (figure.bar, figure.at_most) for figure in found}
    assert bars == {
        "forward of the kernel's speed": (0.95, False),
        "both of the kernel's speed": (0.92, False),
        "with copies over without": (1.03, True),
        "share of the time around the kernels": (0.02, True),
        "backward": (bar, False),  # only where the kernel alone reaches it
        "backward of the kernel": (None, False),
    }
    assert all(figure.bar is None for figure in gpu.ring(8, 32, "host", "kv", lambda: "aten-cpu", 1))
