"""Plans of many models, clusters, lengths and masks: what they say is so; what they print can be pasted."""

import argparse
import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from burst_mcore.deepspeed.section import section_of
from burst_mcore.megatron.arguments import add_arguments, burst_config
from burst_plan.cli import app
from burst_plan.step.advice import deepspeed_config, megatron_flags
from burst_plan.step.planned import planned, text

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
