"""Plans of many models, clusters, lengths and masks: what they say is so; what they print can be pasted."""

import argparse
import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from burst_mcore.attention.choose import AS_FAST
from burst_mcore.deepspeed.config.section import section_of
from burst_mcore.megatron.arguments import add_arguments, burst_config
from burst_mcore.rates import Rates
from burst_plan.cli import app
from burst_plan.machines import machine, machine_of
from burst_plan.step.advice import deepspeed_config, megatron_flags
from burst_plan.step.planned import planned, text
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
            assert reason.startswith("no plan fits") and not answer.ranked
            continue
        close = [one for one in answer.ranked if one.seconds <= AS_FAST * answer.ranked[0].seconds]
        assert reason.startswith(f"{chosen.plan} is fastest") and chosen in close
        assert ("equally fast" in reason) == (len(close) > 1)
        exposed = chosen.times.exposed
        assert f"{sum(exposed.values()) / chosen.seconds:.0%} of a step" in reason
        if most := re.search(r"\(most: ([^)]*)\)", reason):
            assert exposed[most[1]] == max(exposed.values())
        offloads = chosen.plan.offload_optimizer or chosen.plan.offload_activations
        assert ("without offload" in reason) == offloads
        slower = answer.ranked[len(close) :]
        compared, _, trust = reason.rpartition(". ")
        assert (f"{slower[0].plan} takes" in compared) if slower else compared.endswith(("fits", "as fast"))
        assert trust == f"Its speed is {chosen.errors}"
        told += 1
    assert told >= 7 and any("without offload" in one.reason for one in answers.values())


def test_a_reason_stands_where_the_host_has_the_faster_memory(tmp_path):
    slow = tmp_path / "rates.json"
    Rates(compute=1e14, intra=1e11, inter=2e10, latency=1e-5, memory=1e9).save(slow)
    answer = planned(_folder(tmp_path, "llama"), "4K", "h200:1x8", 8, slow)
    assert answer.chosen.plan.offload_optimizer and "without offload it takes" in answer.reason


def test_what_is_pasted_is_read_as_it_was_predicted(answers):
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser = add_arguments(arguments.add_megatron_arguments(parser))
    plans = [one for each in answers.values() for one in (each.best_of("megatron"), *each.ranked[:40:20])]
    pasted = {str(one.plan): one for one in plans if one is not None}
    assert any(one.plan.ep > 1 for one in pasted.values())
    for one in pasted.values():
        if one.plan.framework == "deepspeed":
            section = section_of(deepspeed_config(one))
            assert str(section.attention.layout) == one.attention.layout
            continue
        read = parser.parse_args(shlex.split(" ".join(megatron_flags(one))))
        assert (read.expert_model_parallel_size or 1) == one.plan.ep
        assert read.seq_length >= one.seq and read.global_batch_size == one.plan.dp * one.plan.micro
        if one.plan.cp > 1:
            assert burst_config(read).ring == one.attention.ring


def test_where_nothing_fits_the_reason_says_what_would(tmp_path):
    answer = planned("llama3-8b", "64M", "h100:1x8", 1, None)
    length = max(seq for seq, _ in answer.lengths.values())
    assert answer.reason.startswith(f"no plan fits {64 * 2**20} tokens; {length} tokens would fit (")
    answer = planned("llama3-405b", "64K", "h100:1x8", 1, None)
    assert answer.reason == "no plan fits 65536 tokens; nor does any plan fit a shorter sequence"
    shown = text(answer, 3)
    assert answer.reason in shown.splitlines() and "recommended" not in shown
    assert "longest sequence, megatron: none fits" in shown and "longest sequence, deepspeed: none" in shown


MEGATRON = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --swiglu"


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


NAMES = {
    "NVIDIA A100-SXM4-80GB": ("A100-NVLink", "a100"),
    "NVIDIA A100-PCIE-40GB": ("A100-PCIe", "a100-pcie"),
    "NVIDIA A800-SXM4-80GB": ("A800", "a800"),
    "NVIDIA H100 80GB HBM3": ("H100", "h100"),
    "NVIDIA H200": ("H200", "h200"),
    "NVIDIA B200": ("B200", "b200"),
    "NVIDIA GB200": ("GB200", "GB200"),
    "NVIDIA L20": ("L20-PCIe", "l20-pcie"),
    "NVIDIA L40S": ("L40S", "L40S"),
    "NVIDIA GeForce RTX 4090": ("RTX4090", "RTX 4090", "4090", "rtx-4090"),
    "AMD Instinct MI300X": ("MI300X", "mi300x"),
}
"""By what CUDA says: the name here, and what people write."""


def test_machines_have_the_names_that_people_write():
    for cuda, (name, *written) in NAMES.items():
        assert machine_of(cuda) == name
        for word in written:
            known = machine(word)
            assert known.name == name and known.memory >= 24e9
            assert known.rates.compute <= known.tflops * 1e12
    assert machine_of("NVIDIA L40") is machine_of("NVIDIA GeForce RTX 5090") is None
    with pytest.raises(ValueError, match="unknown machine 'tpu': one of A100-NVLink"):
        machine("tpu")


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


def test_every_speed_comes_with_the_errors_of_its_kind(tmp_path):
    asked = ["plan", "--model", "7b", "--seq", "128K", "--cluster", "a800:1x8"]
    done = CliRunner().invoke(app, [*asked, "--top", "3", "--json", str(tmp_path / "plan.json")])
    answer = json.loads((tmp_path / "plan.json").read_text())
    plans = [*answer["plans"], answer["recommended"]]
    assert len(plans) > 50
    for plan in plans:
        kind = "TP or PP" if re.search("TP|PP", plan["words"]) else "long context"
        errors = plan["errors"]
        assert errors["kind"] == kind and errors["runs"] > 0 and errors["low"] < errors["high"]
        assert errors["words"].endswith(f"were {errors['range']} off the measured speed")
    assert {plan["errors"]["kind"] for plan in plans} == {"TP or PP", "long context"}
    assert answer["reason"].count("public runs of this kind") == 1
    assert re.search(r"tokens/s/GPU +off by +MFU", done.output)
    assert f"speeds: {answer['recommended']['errors']['words']}" in done.output
    fsdp = CliRunner().invoke(app, [*asked[:-4], "--seq", "8K", *asked[-2:], "--batch", "16", "--top", "1"])
    assert "of this kind (dense FSDP)" in fsdp.output
