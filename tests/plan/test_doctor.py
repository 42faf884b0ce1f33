"""The doctor, and the benchmark beside Ulysses, as they are started."""

import json
import os
import re
import sys
from pathlib import Path

import limits
import pytest
from engines import config_of
from typer.testing import CliRunner

from burst_plan.cli import app
from burst_plan.step.memory import stack, total
from burst_plan.step.model import PRESETS
from burst_plan.step.plan import Plan

ROOT = Path(__file__).parents[2]


def sizes(heads=32, kv_heads=8, head_dim=128, layers=32):
    """The options of a model of such sizes, in Megatron's words."""
    words = f"--num-layers {layers} --hidden-size {heads * head_dim} --num-attention-heads {heads} --swiglu "
    words += f"--group-query-attention --num-query-groups {kv_heads} --kv-channels {head_dim} "
    return "--model", f"{words} --vocab-size 128256 --untie-embeddings-and-output-weights"


def _doctor(path, config, *options):
    (path / "ds.json").write_text(json.dumps(config))
    return CliRunner().invoke(app, ["doctor", str(path / "ds.json"), *options])


def test_one_model_says_the_memory_of_a_rank(tmp_path):
    """As the planner has it; where it knows no speed, memory is told; where no bytes, the reason."""
    config = config_of(3, 8) | {"bf16": {"enabled": True}}
    words = ("--model", "llama3-8b", "--seq", "128K", "--world", "8")
    told = _doctor(tmp_path, config, *words, "--device", "h100").output
    side = re.search(r"attention: .* backward (\w+)", told)[1]
    sizes, plan = PRESETS["llama3-8b"], Plan(framework="deepspeed", cp=8, zero=3)
    one, two = (total(stack(sizes, plan, n, side)) / 1e9 for n in (2**17, 2**18))
    assert f"memory of a rank: about {one:.0f} GB" in told
    assert "80 GB, 78 of them for tensors: it does not" in told
    assert told.count("memory of a rank") == 1
    here = _doctor(tmp_path, config, *words).output
    assert f"memory of a rank: about {one:.0f} GB" in here and "of them for tensors" not in here
    assert "step: not predicted: no known GPU is here" in here
    pairs = config | {"train_micro_batch_size_per_gpu": 2}
    told = _doctor(tmp_path, pairs, *words, "--device", "h100").output
    assert f"memory of a rank: about {two:.0f} GB" in told and two > 1.5 * one
    assert "step: not predicted: steps are predicted with a train_micro_batch_size_per_gpu of 1" in told
    plain = _doctor(tmp_path, config_of(3, 8), *words, "--device", "h100").output
    assert "memory of a rank, and its step: not predicted for 8.03 billion parameters: " in plain
    assert any(line.endswith("one of 16 bits: enable bf16") for line in plain.splitlines())


@pytest.mark.slow
def test_the_example_trains_and_resumes(tmp_path):
    (tmp_path / "text.py").write_text("def f(x):\n    return x\n" * 400)
    out = tmp_path / "out"
    start = [
        *(sys.executable, "-W", "ignore", str(ROOT / "examples" / "finetune_hf.py")),
        *("--config", str(ROOT / "examples" / "deepspeed" / "zero3_sp4.json"), "--tokens", "120"),
        *("--data", str(tmp_path), "--out", str(out), "--save-every", "100"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "LOCAL_RANK"):
        environment.pop(name, None)
    for steps in (3, 5, 5):
        done = limits.run([*start, "--steps", steps], env=environment)
        assert done.returncode == 0, done.stderr
    assert "all 5 steps are done" in done.stdout
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
