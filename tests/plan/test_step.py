"""A whole training step: sizes, memory, time, the search, and what it advises."""

import argparse
import itertools
import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from burst_mcore.attention.choose import Question, decide
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.megatron.arguments import add_arguments
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.simulate.search import taken
from burst_plan.step.advice import megatron_flags
from burst_plan.step.figures import Cluster
from burst_plan.step.memory import shard_of, stack, states, total
from burst_plan.step.model import PRESETS
from burst_plan.step.plan import Plan
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
