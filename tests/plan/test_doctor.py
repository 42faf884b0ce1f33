"""The doctor, and the benchmark beside Ulysses, as they are started."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import limits
import pytest
import transformers
from engines import config_of, model_of
from typer.testing import CliRunner

from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.step.memory import stack, total
from burst_plan.step.model import PRESETS
from burst_plan.step.way import Way

ROOT = Path(__file__).parents[2]


def test_the_doctor_explains_the_examples():
    for name, groups in (("zero3_sp4", "4 data-parallel x 4"), ("zero2_dp2_sp2", "8 data-parallel x 2")):
        path = str(ROOT / "examples" / "deepspeed" / f"{name}.json")
        done = CliRunner().invoke(app, ["doctor", path, "--world", "16", "--seq", "8K"])
        assert done.exit_code == 0, done.output
        assert (
            groups in done.output and "kernel on this" in done.output and "bytes of attention" in done.output
        )


def test_the_doctor_names_the_packages_that_change_what_runs(tmp_path, monkeypatch):
    def packages():
        done = CliRunner().invoke(app, ["doctor", "--model", "7b", "--world", "1", "--device", "h100"])
        assert done.exit_code == 0, done.output
        here, lacks = done.output.splitlines()[-1].removeprefix("packages here: ").split("; not here: ")
        return here.split(", "), lacks.split(", ")

    here, lacks = packages()
    assert "DeepSpeed" in here and "apex's weight gradient" in lacks
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    there, others = packages()
    assert {*there} - {*here} == {*lacks} - {*others} == {"apex's weight gradient"}


def test_the_doctor_says_what_initialize_would_refuse(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(config_of(2, 2, layuot="zigzag")))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "ds.json")])
    assert done.exit_code == 2 and 'did you mean "layout"' in done.output
    (tmp_path / "ds.json").write_text(json.dumps(config_of(2, 2)))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "ds.json"), "--world", "3"])
    assert done.exit_code == 2 and "refused (sequence_parallel_size)" in done.output


def sizes(heads=32, kv_heads=8, head_dim=128, layers=32):
    """The options of a model of such sizes, in Megatron's words."""
    words = f"--num-layers {layers} --hidden-size {heads * head_dim} --num-attention-heads {heads} --swiglu "
    words += f"--group-query-attention --num-query-groups {kv_heads} --kv-channels {head_dim} "
    return "--model", f"{words} --vocab-size 128256 --untie-embeddings-and-output-weights"


def _doctor(path, config, *options):
    (path / "ds.json").write_text(json.dumps(config))
    return CliRunner().invoke(app, ["doctor", str(path / "ds.json"), *options])


def test_the_doctor_takes_the_rates_of_a_file(tmp_path):
    config = config_of(2, 4)
    asked = ("--device", "a800", "--seq", "64K", "--world", "4", "--per-node", "2", *sizes(heads=8))
    preset = _doctor(tmp_path, config, *asked).output
    file, slow = tmp_path / "rates.json", MACHINES["A800"].rates
    for rates, same in ((slow, True), (replace(slow, inter=slow.inter / 1e3, intra=slow.intra * 10), False)):
        rates.save(file)
        done = _doctor(tmp_path, config, *asked, "--rates", str(file))
        assert done.exit_code == 0 and (done.output == preset) == same, done.output
    done = _doctor(tmp_path, config, "--rates", str(tmp_path / "none.json"))
    assert done.exit_code == 2 and "is no file of rates" in done.output
    assert len(done.output.splitlines()) == 1


def test_the_doctor_predicts_for_devices_that_are_not_there(tmp_path):
    config = {**config_of(3, 8), "bf16": {"enabled": True}}
    done = _doctor(tmp_path, config, "--device", "h100", "--seq", "1M", "--world", "64", "--per-node", "8")
    assert done.exit_code == 0, done.output
    assert "kernel on H100, bfloat16: the first installed that serves, of flash3" in done.output
    plain = _doctor(tmp_path, config_of(3, 8), "--device", "h100", "--seq", "64K", "--world", "8")
    assert "kernel on H100, float32: the first installed that serves, of triton\n" in plain.output
    assert re.search("memory of a rank: about .* GB .*8.03 billion parameters; there are 80 GB", done.output)
    assert "optimizer" in done.output
    trainers = {**config, "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}
    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    done = _doctor(tmp_path, {**trainers, "zero_optimization": zero}, "--device", "h100")
    assert done.exit_code == 0 and ", optimizer" not in done.output
    zero["offload_optimizer"]["device"] = "none"
    done = _doctor(tmp_path, {**trainers, "zero_optimization": zero}, "--device", "h100")
    assert done.exit_code == 0 and ", optimizer" in done.output
    done = _doctor(tmp_path, config, "--device", "h1000")
    assert done.exit_code == 2 and "unknown machine 'h1000': one of A100-NVLink, A800" in done.output
    done = _doctor(tmp_path, config, *sizes(heads=12, kv_heads=5))
    assert done.exit_code == 2 and "12 query heads do not group over 5 K/V heads" in done.output


def test_the_doctor_counts_no_ring_of_one_rank(tmp_path):
    """The total is that of its parts, none of which is a ring's."""
    asked = ("--device", "h100", "--seq", "128K", "--world", "8")
    bf16 = {"bf16": {"enabled": True}}
    alone, shared = (_doctor(tmp_path, config_of(3, size) | bf16, *asked).output for size in (1, 2))
    assert ", ring buffers " in shared and ", ring buffers " not in alone
    assert "ring: none, a rank has the whole sequence" in alone
    total, parts = re.search(r"memory of a rank: about ([\d.e+]+) GB \(([^)]*)\)", alone).groups()
    sizes = {name: float(size) for name, size in (part.rsplit(None, 1) for part in parts.split(", "))}
    assert "ring" not in sizes and sum(sizes.values()) == pytest.approx(float(total), rel=0.01)


def test_one_model_says_the_memory_of_a_rank(tmp_path):
    """As the planner has it; where it knows no speed, memory is told; where no bytes, the reason."""
    config = config_of(3, 8) | {"bf16": {"enabled": True}}
    words = ("--model", "llama3-8b", "--seq", "128K", "--world", "8")
    told = _doctor(tmp_path, config, *words, "--device", "h100").output
    side = re.search(r"attention: .* backward (\w+)", told)[1]
    sizes, way = PRESETS["llama3-8b"], Way(framework="deepspeed", cp=8, zero=3)
    one, two = (total(stack(sizes, way, n, side)) / 1e9 for n in (2**17, 2**18))
    assert (
        f"memory of a rank: about {one:.0f} GB" in told
        and "80 GB, 78 of them for tensors: it does not" in told
    )
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


def test_heads_are_shared_within_a_node_in_the_prediction_too(tmp_path):
    config = config_of(3, 8, head_parallel="auto") | {"bf16": {"enabled": True}}
    asked = ("--device", "h100", "--seq", "64K", "--world", "8", "--per-node", "2")
    told = _doctor(tmp_path, config, *asked, *sizes(heads=8, layers=2)).output
    shared = re.search(r"way: .*heads over (\d+)", told)
    assert f"head_parallel {shared[1] if shared else 1}, " in told.split("attention: ")[1].splitlines()[0]


def test_the_doctor_refuses_no_heads_and_large_ones(tmp_path):
    for options, words in (
        (sizes(kv_heads=0), "--num-query-groups must be at least 1, got 0"),
        (sizes(head_dim=512), "serve heads of at most 256, got 512"),
        (("--world", "1000000"), "--world must be at least 1 and at most 16384"),
        (("--gpu", "memory=24GB,tflops=165"), "--gpu needs gb and link for 1 node of 2"),
    ):
        done = _doctor(tmp_path, config_of(2, 2), *options)
        assert done.exit_code == 2 and words in done.output, done.output
        assert len(done.output.splitlines()) == 1


def test_the_doctor_takes_the_shape_of_a_model(tmp_path):
    config = config_of(2, 2)
    model_of(heads=4, kv_heads=2).config.save_pretrained(tmp_path)
    done = _doctor(tmp_path, config, "--model", str(tmp_path), "--seq", "4K")
    count = sum(p.numel() for p in model_of().parameters())
    assert done.exit_code == 0, done.output
    assert f"for {count / 1e9:.3g} billion parameters" in done.output
    done = _doctor(tmp_path, config, "--model", str(tmp_path / "none"))
    assert done.exit_code == 2 and "no causal LM in" in done.output
    transformers.MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=32).save_pretrained(tmp_path)
    done = _doctor(tmp_path, config, "--model", str(tmp_path))
    assert done.exit_code == 0 and "layers: 0 with attention, 1 with a Mamba 1" in done.output, done.output


@pytest.mark.slow
def test_the_benchmark_where_heads_do_not_divide():
    from burst_bench.run import run
    from burst_bench.subjects.step import StepCase

    case = StepCase(ranks=2, heads=3, kv_heads=3, seq=64, layers=1, head_dim=8)
    results = run(StepCase, {"small": case}, [], 1, "cpu")
    table = results.tables["small"]
    assert results.errors == []
    assert min(table["burst auto", "wall"] + table["burst auto", "written"]) > 0
    assert table["burst auto", "first loss"][0] == pytest.approx(
        table["burst ring", "first loss"][0], rel=1e-4
    )
    refused = {entry["method"]: entry["reason"] for entry in results.refused}
    assert "not divisible" in refused["ulysses (UlyssesSPAttentionHF)"]
    assert refused["burst hybrid"].endswith("3 heads do not divide by 2")
    assert [bar.claim for bar in results.bars] == ["auto's step over Ulysses'"]


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


SRUN = """#!/bin/bash
# As Slurm: the command once on each node, one of them failing fails all.
shift  # --kill-on-bad-exit=1
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & started+=($!); done
for one in "${started[@]}"; do wait "$one" || exit 1; done
"""


@pytest.mark.slow
def test_the_slurm_script_starts_a_launcher_on_each_node(tmp_path):
    """Two nodes of two processes; srun and scontrol are stand-ins, and both nodes are this machine."""
    tools, data = tmp_path / "bin", tmp_path / "data"
    tools.mkdir(), data.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (data / "text.py").write_text("def f(x):\n    return x\n" * 400)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_NODELIST": "here[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "1",
    }
    command = [
        *("bash", "examples/finetune.slurm", "--tokens", "120", "--steps", "3"),
        *("--config", "examples/deepspeed/zero3_sp4.json", "--data", data, "--out", tmp_path / "out"),
    ]
    done = limits.run(command, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
