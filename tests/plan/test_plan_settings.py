"""Plans of many models, clusters, lengths and masks: what they say is so; what they print can be pasted."""

import argparse
import importlib
import itertools
import json
import random
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burst_mcore.attention.choose import AS_FAST
from burst_mcore.deepspeed.config.section import section_of
from burst_mcore.megatron.arguments import add_arguments, burst_config
from burst_mcore.rates import Rates
from burst_plan.cli import app, main
from burst_plan.machines import machine, machine_of
from burst_plan.step.advice import deepspeed_config, megatron_flags
from burst_plan.step.figures import TABLE
from burst_plan.step.memory import stack, total
from burst_plan.step.planned import planned, text
from burst_plan.step.way import Way, why_not
from burst_plan.words import gpu

MODELS = {
    "llama": dict(num_key_value_heads=8, intermediate_size=14336),
    "qwen2": dict(num_key_value_heads=4, intermediate_size=11008, tie_word_embeddings=True),
    "qwen3": dict(num_key_value_heads=8, intermediate_size=12288, head_dim=128),
    "gemma": dict(num_key_value_heads=1, head_dim=256, intermediate_size=16384),
    "mixtral": dict(intermediate_size=14336, num_local_experts=8),
    "qwen3_moe": dict(num_key_value_heads=4, intermediate_size=6144, num_experts=128, head_dim=128),
    "deepseek_v3": dict(
        intermediate_size=10944, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
"""Configurations of Hugging Face, by model_type; the other sizes are those of `_folder`."""
PLANS = [
    ("llama", "128K", "h100:1x8", 1, "causal"),
    ("llama", "64K", "a800:3x1", 3, "causal & documents:random,8"),
    ("qwen2", "1000", "a800:1x1", 1, "window:100"),
    ("qwen3", "512K", "h100:1x8", 1, "causal"),
    ("gemma", "32K", "a800:1x8", 8, "full"),
    ("mixtral", "256K", "h200:1x8", None, "causal"),
    ("qwen3_moe", "64K", "h200:1x8", 8, "causal"),
    ("deepseek_v3", "64K", "h100:1x7", 7, "causal"),
    ("deepseek_v3", "10M", "a800:1x4", 1, "causal"),
    ("mixtral", "1", "a800:1x1", 1, "causal"),
]


def _folder(tmp_path, kind):
    sizes = dict(
        model_type=kind, hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, vocab_size=128256,
        hidden_act="silu", num_experts_per_tok=2,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **MODELS[kind]}))
    return str(tmp_path)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return {
        plan: planned(_folder(tmp_path_factory.mktemp("model"), plan[0]), *plan[1:4], None, plan[4])
        for plan in PLANS
    }


def test_a_reason_says_what_the_recommended_way_does(answers):
    told = 0
    for answer in answers.values():
        chosen, reason = answer.chosen, answer.reason
        if chosen is None:
            assert reason.startswith("no way fits") and not answer.ranked
            continue
        close = [one for one in answer.ranked if one.seconds <= AS_FAST * answer.ranked[0].seconds]
        assert reason.startswith(f"{chosen.way} is fastest") and chosen in close
        assert ("equally fast" in reason) == (len(close) > 1)
        exposed = chosen.times.exposed
        assert f"{sum(exposed.values()) / chosen.seconds:.0%} of a step" in reason
        if most := re.search(r"\(most: ([^)]*)\)", reason):
            assert exposed[most[1]] == max(exposed.values())
        offloads = chosen.way.offload_optimizer or chosen.way.offload_activations
        assert ("without offload" in reason) == offloads
        slower = answer.ranked[len(close) :]
        compared, _, trust = reason.rpartition(". ")
        assert (f"{slower[0].way} takes" in compared) if slower else compared.endswith(("fits", "as fast"))
        assert trust == f"Its speed is {chosen.errors}"
        told += 1
    assert told >= 7 and any("without offload" in one.reason for one in answers.values())


def test_a_plan_of_experts_is_printed_and_written(answers):
    answer = answers["mixtral", "1", "a800:1x1", 1, "causal"]
    assert answer.reason in text(answer, 3)
    assert json.loads(json.dumps(answer.as_json()))["reason"] == answer.reason


def test_a_reason_stands_where_the_host_has_the_faster_memory(tmp_path):
    slow = tmp_path / "rates.json"
    Rates(compute=1e14, intra=1e11, inter=2e10, latency=1e-5, memory=1e9).save(slow)
    answer = planned(_folder(tmp_path, "llama"), "4K", "h200:1x8", 8, slow)
    assert answer.chosen.way.offload_optimizer and "without offload it takes" in answer.reason


def test_rates_beyond_the_peak_are_another_machines(tmp_path):
    fast = tmp_path / "rates.json"
    Rates(compute=2e14, intra=1e11, inter=2e10, latency=1e-5, memory=1e12).save(fast)
    words = ["--model", "7b", "--seq", "32K", "--rates", str(fast), "--cluster"]
    assert CliRunner().invoke(app, ["plan", *words, "a800:1x8"]).exit_code == 0
    done = CliRunner().invoke(app, ["plan", *words, "l20:1x8"])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert "kernel of 200 TFLOP/s, more than the peak of L20-PCIe 1x8, 119.5" in done.output


def test_what_is_pasted_is_read_as_it_was_predicted(answers):
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser = add_arguments(arguments.add_megatron_arguments(parser))
    ways = [one for each in answers.values() for one in (each.best_of("megatron"), *each.ranked[:40:20])]
    pasted = {str(one.way): one for one in ways if one is not None}
    assert any(one.way.ep > 1 for one in pasted.values())
    for one in pasted.values():
        if one.way.framework == "deepspeed":
            section = section_of(deepspeed_config(one))
            assert str(section.attention.layout) == one.attention.layout
            continue
        read = parser.parse_args(shlex.split(" ".join(megatron_flags(one))))
        assert (read.expert_model_parallel_size or 1) == one.way.ep
        assert read.seq_length >= one.seq and read.global_batch_size == one.way.dp * one.way.micro
        if one.way.cp > 1:
            assert burst_config(read).ring == one.attention.ring


def test_one_rank_has_one_stage_of_zero():
    answer = planned(MEGATRON, "8K", "a800:1x1", 1, None)
    stages = {one.way.zero for one in answer.ranked if one.way.framework == "deepspeed"}
    assert stages == {1}


def test_a_vocabulary_of_any_size_is_shared_by_tp():
    answer = planned(MEGATRON.replace("32000", "50257"), "8K", "a800:1x8", 1, None)
    assert any(one.way.tp == 8 for one in answer.ranked)


def test_where_nothing_fits_the_reason_says_what_would(tmp_path):
    answer = planned("llama3-8b", "64M", "h100:1x8", 1, None)
    length = max(seq for seq, _ in answer.lengths.values())
    assert answer.reason.startswith(f"no way fits {64 * 2**20} tokens; {length} tokens would fit (")
    answer = planned("llama3-405b", "64K", "h100:1x8", 1, None)
    assert answer.reason == "no way fits 65536 tokens; nor does any way fit a shorter sequence"
    shown = text(answer, 3)
    assert answer.reason in shown.splitlines() and "recommended" not in shown
    assert "longest sequence, megatron: none fits" in shown and "longest sequence, deepspeed: none" in shown


def test_longer_sequences_take_more_memory(answers):
    pick = random.Random(0)
    for answer in answers.values():
        for way in pick.sample(answer.legal, 5):
            for direction, nodes in itertools.product(("query", "kv"), (1, 2)):
                sizes = [total(stack(answer.model, way, n, direction, nodes)) for n in (2048, 10**5, 10**7)]
                assert sizes == sorted(sizes) and sizes[0] < sizes[2]


def test_ranks_that_share_experts_hold_fewer_of_them(answers):
    answer = next(one for (kind, *_), one in answers.items() if kind == "qwen3_moe")
    ways = [Way(cp=1, dp=8, ep=ep, micro=1, zero=0, recompute="full") for ep in (1, 2, 8)]
    assert all(why_not(way, answer.model, answer.seq, answer.place.ranks) is None for way in ways)
    weights = [stack(answer.model, way, answer.seq)["weights"] for way in ways]
    experts = 2 * answer.model.expert_parameters
    assert weights[0] - weights[1] == pytest.approx(experts / 2)
    assert weights[0] - weights[2] == pytest.approx(experts * 7 / 8)
    assert "does not divide 128 experts" in why_not(Way(dp=8, ep=3), answer.model, 65536, answer.place.ranks)


MEGATRON = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --swiglu"
EXPERTS = "--num-experts 8 --moe-router-topk 2"


@pytest.mark.parametrize(
    ("command", "model", "words"),
    [
        ("plan", f"{MEGATRON} --expert-model-parallel-size 2", "needs --num-experts"),
        ("plan", f"{MEGATRON} {EXPERTS} --expert-model-parallel-size 3", "EP 3 does not divide"),
        ("plan", f"{MEGATRON} {EXPERTS} --moe-layer-freq maybe", "--moe-layer-freq is a number, or a list"),
        ("plan", f"{MEGATRON} {EXPERTS} --expert-tensor-parallel-size 2", "is not planned"),
        ("plan", f"{MEGATRON} --global-batch-size 3 --context-parallel-size 2 --tensor-model-parallel-size 2"
         " --pipeline-model-parallel-size 1", "3 sequences do not divide"),
        ("doctor", f"{MEGATRON} --context-parallel-size 3", "do not divide 8 ranks"),
        ("doctor", f"{MEGATRON} --window-size 128,0", "for windows and documents use plan --mask"),
        ("doctor", f"{MEGATRON} --recompute-granularity selective", "selective is not predicted"),
        ("doctor", f"{MEGATRON} --context-parallel-attention-backend burst --burst-recompute segment"
         " --burst-recompute-keep auto --burst-recompute-memory-gb 4", "auto is not predicted"),
        ("doctor", f"{MEGATRON} --num-layers none", "invalid int value"),
    ],
)  # fmt: skip
def test_contradictions_are_one_line_and_status_2(command, model, words):
    cluster = ["--cluster", "a800:1x8"] if command == "plan" else ["--world", "8", "--device", "a800"]
    done = CliRunner().invoke(app, [command, "--model", model, "--seq", "64K", *cluster])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert words in done.output


def test_a_package_that_is_missing_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tabulate", None)
    wanted = [f"--json={tmp_path / 'plan.json'}"]
    words = ["plan", "--model", MEGATRON, "--seq", "8K", "--cluster", "a800:1x1", *wanted]
    monkeypatch.setattr(sys, "argv", ["burst-mcore", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert told == (
        "burst-mcore: this needs the package tabulate, which is not installed: pip install "
        "'.[cli]' in a clone, or 'FILE.whl[cli]'\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--unknown"], "burst-mcore: No such option"),
        (["nosuch"], "burst-mcore: No such command 'nosuch'"),
        (["explain", "--heads", "x"], "burst-mcore explain: Invalid value"),
        (["explain", "--heads"], "burst-mcore: Option '--heads' requires an argument"),
        (["bench", "nosuch"], "burst-mcore bench: argument SUBJECT: invalid choice"),
        (["explain", "--cluster", "h100:100000x8"], "a cluster has at most 16384 ranks here, got 800000"),
        (["plan", "--model", "7b", "--seq", "8K", "--cluster", "9999999x9"], "at most 16384 ranks"),
        (["explain", "--head-dim", "100000000"], "kernels serve heads of at most 256, got one of 100000000"),
        (["explain", "--heads", "1000000000"], "heads must be at most 65536, got 1000000000"),
        (["calibrate", "--out", "/"], "burst-mcore calibrate: cannot write /: Is a directory"),
        (["calibrate", "--out", "/proc/rates.json"], "burst-mcore calibrate: cannot write /proc/rates.json"),
        (["draw", "--out", "/proc/x/y.json"], "burst-mcore draw: "),
        (
            ["plan", "--model", "7b", "--seq", "8K", "--gpu", "memory=24GB,tflops=9,gb=9"],
            "give a cluster such",
        ),
    ],
)
def test_nonsense_is_one_line_before_any_work(words, told, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the command began to work")

    monkeypatch.setattr("burst_bench.calibrate.measure", never)
    monkeypatch.setattr("burst_plan.explain.predict.draw", never)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert told in done.output


def test_without_the_packages_of_the_command_a_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "burst_plan.cli")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("burst_plan.cli")
    told = "burst-mcore needs packages: pip install '.[cli]' in a clone, or 'FILE.whl[cli]'\n"
    assert ended.value.code == 2 and capsys.readouterr().err == told


def test_a_list_without_rows_is_refused(tmp_path):
    (tmp_path / "rows.json").write_text("[]")
    done = CliRunner().invoke(app, ["plan", "--against", str(tmp_path / "rows.json")])
    assert done.exit_code == 2 and done.output.endswith("rows.json has no rows\n")


def test_a_machine_is_described_in_one_option():
    described = "memory=24GB, tflops=165.2, gb=1008"
    answer = planned(MEGATRON, "8K", "1x1", 1, None, None, described)
    place, like = answer.place, machine("A100")
    assert (place.memory, place.peak, place.rates.memory) == (24e9, 165.2e12, 1008e9)
    assert place.rates.compute / place.peak == pytest.approx(like.forward) and answer.chosen is not None
    for asked, ranks, nodes, words in (
        (described, 8, 1, "needs link for 1 node of 8"),
        (described, 8, 2, "needs link and nic for 2 nodes of 8"),
        ("memory=24", 1, 1, "needs tflops and gb"),
        (f"{described},gb=9", 1, 1, "each once, got 'gb=9'"),
        ("memory=0,tflops=1,gb=1", 1, 1, "got 'memory=0'"),
        ("memory=24TB,tflops=1,gb=1", 1, 1, "got 'memory=24tb'"),
    ):
        with pytest.raises(ValueError, match=words):
            gpu(asked, ranks, nodes)
    linked = gpu(f"{described},link=32,nic=12.5", 8, 2).rates
    assert (linked.intra / linked.inter) == pytest.approx(32 / 12.5)


@pytest.mark.parametrize("name", ["GB200", "b300", "H20", "L40S", "RTX 4090", "4090", "rtx-4090", "mi300x"])
def test_machines_have_the_names_that_people_write(name):
    known = machine(name)
    assert known.rates.compute <= known.tflops * 1e12 and known.memory >= 24e9
    cuda = {"RTX4090": "NVIDIA GeForce RTX 4090", "MI300X": "AMD Instinct MI300X"}
    assert machine_of(cuda.get(known.name, f"NVIDIA {known.name}")) == known.name
    assert machine_of("NVIDIA L40") is None and machine_of("NVIDIA H200") == "H200"


@pytest.mark.parametrize("columns", [60, 100])
def test_tables_are_no_wider_than_the_terminal(columns, tmp_path):
    files = ["--out", str(tmp_path / "name.json")]
    for words, head in (
        (["explain", "--cluster", "2x2", "--seq", "8K"], "head_parallel"),
        (["plan", "--model", MEGATRON, "--seq", "8K", "--cluster", "a800:1x2", "--top", "3"], "tokens/s/GPU"),
        (["draw", "--cluster", "1x4", "--seq", "4K", *files], "step | rank 0"),
    ):
        narrow, wide = (
            CliRunner().invoke(app, words, env={"COLUMNS": str(width)}) for width in (columns, 400 * columns)
        )
        assert narrow.exit_code == wide.exit_code == 0, narrow.output
        for done, most in ((narrow, columns), (wide, 400 * columns)):
            lines = done.output.splitlines()
            begin = next(i for i, line in enumerate(lines) if head in line)
            shown = [*itertools.takewhile(re.compile(r"(?!\(|and |speeds).").match, lines[begin:])]
            assert len(shown) > 4 and max(map(len, shown)) <= most, shown
        assert "columns" in narrow.output and "columns wide" not in wide.output
    assert f"trace: {tmp_path / 'name.json'}" in narrow.output and (tmp_path / "name.json").is_file()


def test_a_number_of_ways_and_a_length_have_bounds(tmp_path):
    for option, value, words in (
        ("--top", "0", "--top must be at least 1"),
        ("--seq", "9" * 400, "a number of tokens is at most"),
        ("--batch", "9" * 400, "--batch must be at least 1 and at most"),
    ):
        done = CliRunner().invoke(app, ["plan", "--model", "7b", "--seq", "8K", option, value])
        assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
        assert words in done.output


def test_the_doctor_reviews_megatrons_arguments():
    given = f"{MEGATRON} --context-parallel-size 8 --use-distributed-optimizer"
    words = ["doctor", "--seq", "64K", "--world", "8", "--device", "a800", "--model"]
    done = CliRunner().invoke(app, [*words, given])
    assert done.exit_code == 0, done.output
    assert "step (predicted): megatron, CP 8, ZeRO-1, recompute none" in done.output
    assert "it fits" in done.output and "(taken for Megatron's own, p2p)" in done.output
    done = CliRunner().invoke(app, [*words, f"{given} --context-parallel-attention-backend burst"])
    assert done.exit_code == 0 and "taken for" not in done.output
    done = CliRunner().invoke(app, [*words[:2], "64M", *words[3:], given])
    assert done.exit_code == 0 and "it does not fit" in done.output, done.output


def test_the_doctor_reviews_deepspeeds_json_or_says_why_not(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "sequence_parallel_size": 8,
        "zero_optimization": {"stage": 1}, "burst_attention": {"checkpointing": {"policy": "full"}},
    }  # fmt: skip
    file = tmp_path / "ds.json"
    words = ["doctor", str(file), "--model", "7b", "--seq", "128K", "--world", "8", "--device", "a800"]
    file.write_text(json.dumps(config))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "it fits" in done.output, done.output
    assert "faster: deepspeed" in done.output and '"sequence_parallel_size": 8' in done.output
    file.write_text(json.dumps({**config, "train_micro_batch_size_per_gpu": 2}))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "step: not predicted" in done.output and "memory of a rank" in done.output


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/plan.json", "there is no folder"),
        ("file/plan.json", "there is no folder"),
        (".", "cannot write"),
        ("n" * 300, "cannot write"),
        ("/proc/plan.json", "cannot write"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line_and_status_2(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    asked = ["plan", "--model", "7b", "--seq", "128K", "--cluster", "a800:1x8", "--json", path]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1 and words in done.output, done.output
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and Path("file").read_text() == "kept"


def test_every_speed_comes_with_the_errors_of_its_kind(tmp_path):
    asked = ["plan", "--model", "7b", "--seq", "128K", "--cluster", "a800:1x8"]
    done = CliRunner().invoke(app, [*asked, "--top", "3", "--json", str(tmp_path / "plan.json")])
    plan = json.loads((tmp_path / "plan.json").read_text())
    ways = [*plan["ways"], plan["recommended"]]
    assert len(ways) > 50
    for way in ways:
        kind = "TP or PP" if re.search("TP|PP", way["words"]) else "long context"
        errors = way["errors"]
        assert errors["kind"] == kind and errors["runs"] > 0 and errors["low"] < errors["high"]
        assert errors["words"].endswith(f"were {errors['range']} off the measured speed")
    assert {way["errors"]["kind"] for way in ways} == {"TP or PP", "long context"}
    assert plan["reason"].count("public runs of this kind") == 1
    assert re.search(r"tokens/s/GPU +off by +MFU", done.output)
    assert f"speeds: {plan['recommended']['errors']['words']}" in done.output
    fsdp = CliRunner().invoke(app, [*asked[:-4], "--seq", "8K", *asked[-2:], "--batch", "16", "--top", "1"])
    assert "of this kind (dense FSDP)" in fsdp.output


def test_a_wheel_has_all_tables():
    root = Path(__file__).parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    step = root / "burst_plan" / "step"
    there = {str(path.relative_to(step)) for path in step.rglob("*.json")}
    assert TABLE in there == set(packaged["burst_plan.step"])
