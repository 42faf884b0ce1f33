"""A whole training step: sizes, memory, time, the search, and what it advises."""

import argparse
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from cells import crossed
from live import LiveBytes
from typer.testing import CliRunner

from burst_mcore.attention.candidates import Question, Ranks
from burst_mcore.attention.choose import decide
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.loss import patch_causal_lm
from burst_mcore.megatron.arguments import add_arguments
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.simulate.search import taken
from burst_plan.step.advice import megatron_flags
from burst_plan.step.figures import Cluster
from burst_plan.step.memory import ON_CPU, moments, shard_of, stack, states, total
from burst_plan.step.model import PRESETS, from_config
from burst_plan.step.plan import Plan, why_not
from burst_plan.step.planned import planned, recommendation
from burst_plan.step.search import least, search
from burst_plan.words import mask_of

A800 = MACHINES["A800"]
PLACE = Cluster(ranks=Ranks(8, 8), rates=A800.rates, peak=A800.tflops * 1e12, memory=A800.memory, name="A800")
MEGATRON = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --swiglu"


@pytest.fixture(scope="module")
def answer():
    return search(PRESETS["7b"], 131072, 1, PLACE)


def test_mfu_is_the_formula_of_the_papers_results():
    seq, tgs = 2**20, 117.83
    s, h, ffn, layers, vocab = seq, 5120, 13824, 40, 120000
    theirs = 12 * s * layers * h**2 * (2 + 0.5 * s / h + 1.5 * ffn / h + vocab / (2 * layers * h))
    mfu = PRESETS["14b"].flops(seq / 2) * tgs / 312e12
    assert mfu == pytest.approx(theirs * tgs / (s * 312e12), rel=1e-12)
    assert mfu == pytest.approx(0.5168, rel=2e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_of_zero_shards_one_more_state(stage):
    whole, sharded = (
        states(PRESETS["7b"], Plan(framework="deepspeed", cp=8, zero=zero)) for zero in (0, stage)
    )
    names = ["optimizer", "gradients", "weights"]
    assert [whole[n] / sharded[n] for n in names] == [8.0] * stage + [1.0] * (3 - stage)


def test_memory_falls_with_what_is_computed_again_and_with_what_is_offloaded():
    plan = Plan(framework="deepspeed", cp=8, zero=3, recompute="none")
    kept = [replace(plan, recompute=word, keep=0.5) for word in ("attention", "segment", "full")]
    sizes = [total(stack(PRESETS["7b"], one, 2**18)) for one in (plan, *kept)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    host = replace(kept[0], offload_activations=True)
    assert total(stack(PRESETS["7b"], host, 2**18)) < sizes[1]
    whole = replace(kept[2], fused_loss=False)
    assert "logits" in stack(PRESETS["14b"], whole, 2**18)


def test_a_steps_parts_are_its_time(answer):
    for one in answer.ranked:
        events = one.timeline()
        assert math.isclose(sum(e["end"] - e["begin"] for e in events), one.seconds)
        assert all(a["end"] == b["begin"] for a, b in itertools.pairwise(events))
        assert one.fits and 0 < one.mfu < 1
    assert [s.seconds for s in answer.ranked] == sorted(s.seconds for s in answer.ranked)


def test_a_sequence_a_little_longer_than_the_longest_does_not_fit(answer):
    for seq, plan in answer.lengths.values():
        sizes = [total(least(PRESETS["7b"], plan, n)) for n in (seq, int(seq * 1.02))]
        assert sizes[0] <= PLACE.usable < sizes[1]


def test_every_way_is_ranked_or_has_a_reason(answer):
    assert len(answer.infeasible) > 100 and all(why for _, why in answer.infeasible)
    assert any(why.startswith("out of memory") for _, why in answer.infeasible)
    found = json.loads(json.dumps(answer.as_json()))
    assert found["recommended"]["fits"] and set(found["paste"]) == {"megatron", "deepspeed"}
    assert len(found["plans"]) == len(answer.ranked)


def test_megatron_knows_every_flag_that_is_read_or_advised(answer):
    arguments = pytest.importorskip("megatron.training.arguments")
    from burst_plan.step.model.arguments import OPTIONAL

    known = add_arguments(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = {flag.split()[0] for one in answer.ranked for flag in megatron_flags(one)}
    for flag in flags | {f"--{name}" for name in OPTIONAL}:
        assert flag in known._option_string_actions, flag


def test_a_plan_prints_and_writes_a_recommendation(tmp_path):
    out = tmp_path / "plan.json"
    words = ["--model", MEGATRON, "--seq", "64K", "--cluster", "h200:1x8", "--json", str(out)]
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert f"recommended: {found['recommended']['words']}" in done.output
    assert "longest sequence, megatron" in done.output and "predicted, not measured" in done.output


def test_ranks_that_do_not_go_evenly_have_a_reason():
    model, ranks = PRESETS["7b"], Ranks(32, 8)
    assert "are not the 32" in why_not(Plan(cp=8), model, 2**17, ranks)
    assert "do not divide 40 layers" in why_not(Plan(pp=32), PRESETS["14b"], 2**17, ranks)
    assert "multiples of the stages" in why_not(Plan(cp=16, pp=2, chunks=2), model, 2**17, ranks)
    assert why_not(Plan(cp=16, pp=2, chunks=2, micro=2), model, 2**17, ranks) is None


SIZES = {"hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 6, "use_cache": False}
DENSE = {"intermediate_size": 640}
MIXTRAL = {"intermediate_size": 320, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 32}
STEPS = [
    *crossed(
        *(["Llama"], [DENSE], (6, 2), (256, 6000), (False, True), [0.03]),
        quick=lambda kind, sizes, kv_heads, vocab, fused, _: (kv_heads == 2) == (vocab == 6000) == fused,
    ),
    ("Mixtral", MIXTRAL, 2, 256, False, 0.05),
    ("Qwen3Moe", QWEN, 2, 256, False, 0.05),
]


@pytest.mark.parametrize(("kind", "sizes", "kv_heads", "vocab", "fused_loss", "within"), STEPS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_that_of_the_tensors_of_a_model_of_transformers(
    kind, sizes, kv_heads, vocab, fused_loss, within, recompute
):
    transformers = pytest.importorskip("transformers")
    of_model = {**SIZES, **sizes, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    config = getattr(transformers, f"{kind}Config")(**of_model)
    predicted, counted = _bytes_of_transformers(transformers, config, recompute, fused_loss)
    assert predicted == pytest.approx(counted, rel=within)


def _bytes_of_transformers(transformers, config, recompute, fused_loss):
    """Return bytes after forward and at the peak of a step, predicted and counted."""
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    if fused_loss:
        patch_causal_lm(model)
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, config.vocab_size, (1, 1536))
    with LiveBytes([x for p in model.parameters() for x in (p, p.grad)]) as live:
        loss = model(input_ids=tokens, labels=tokens).loss
        forward = live.live
        loss.backward()
    plan = Plan(framework="deepspeed", zero=0, recompute=recompute, fused_loss=fused_loss,
              offload_optimizer=True)  # fmt: skip
    sizes = from_config(config.to_dict(), "model")
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    found = {
        name: sum(map(total, stacks)) for name, stacks in moments(sizes, plan, 1536, "query", chunks=ON_CPU)
    }
    return (found["forward"], max(found.values())), (forward, live.peak)


@pytest.mark.parametrize(("mask", "behind"), [("causal", False), ("causal & documents:random,64", True)])
def test_a_plan_names_the_way_of_the_calls_rule_and_settings_where_it_is_behind(mask, behind):
    answer = planned("7b", "256K", "a800:4x8", 1, None, mask)
    runs, (line,) = answer.chosen.attention, [x for x in recommendation(answer) if x.startswith("rule of")]
    shard = replace(shard_of(answer.model, answer.chosen.plan, answer.seq), tokens=2**18 // 32)
    where = Ranks(32, 8), answer.place.rates
    question = Question(shard, Layout.of(runs.layout), mask_of(mask, 2**18), 2**18, *where)
    config = BurstConfig(head_parallel="auto", layout=runs.layout)
    (route, direction, _), chosen = decide(config, question), taken(config, question)
    assert f"head_parallel={route.heads}" in line and f"backward='{direction}'" in line
    slower = chosen.seconds / (runs.forward + runs.backward) - 1
    assert (slower > 0.05) == behind == ("to paste: " in line) != ("as fast (simulated)" in line)
    if behind:
        own = f"ring='{runs.ring}', head_parallel={runs.head_parallel}"
        assert f"{slower:.0%} slower (simulated); to paste: {own}" in line
