"""A whole training step: sizes, memory, time, the search, and what it advises."""

import argparse
import itertools
import json
import math
import shlex
from dataclasses import replace

import pytest
import torch
from live import LiveBytes
from typer.testing import CliRunner

from burst_mcore.attention.candidates import Question, Ranks
from burst_mcore.attention.choose import decide
from burst_mcore.checkpointing import KeepAttention, Offload, Segment
from burst_mcore.config import BurstConfig
from burst_mcore.deepspeed.config.section import section_of
from burst_mcore.layout import Layout
from burst_mcore.loss import patch_causal_lm
from burst_mcore.megatron.arguments import add_arguments, burst_config, recompute_policy
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.simulate.search import taken
from burst_plan.step.advice import deepspeed_config, megatron_flags
from burst_plan.step.attention import AttentionTime
from burst_plan.step.figures import Cluster, PredictedStep, step
from burst_plan.step.memory import ON_CPU, moments, shard_of, stack, states, total
from burst_plan.step.model import PRESETS, from_config, model_of
from burst_plan.step.planned import planned, recommendation, text
from burst_plan.step.search import least, search
from burst_plan.step.way import Way, why_not
from burst_plan.words import mask_of

A800 = MACHINES["A800"]
PLACE = Cluster(ranks=Ranks(8, 8), rates=A800.rates, peak=A800.tflops * 1e12, memory=A800.memory, name="A800")
DEEPSEEK = dict(
    num_hidden_layers=61, hidden_size=7168, num_attention_heads=128, num_key_value_heads=128,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
    first_k_dense_replace=3, intermediate_size=18432, vocab_size=129280, hidden_act="silu",
)  # fmt: skip
MEGATRON = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --swiglu"


@pytest.fixture(scope="module")
def answer():
    return search(PRESETS["7b"], 131072, 1, PLACE)


def test_parameters_are_those_that_makers_publish():
    assert PRESETS["llama3-8b"].parameters == pytest.approx(8.03e9, rel=2e-3)
    assert PRESETS["llama3-70b"].parameters == pytest.approx(70.55e9, rel=2e-3)
    assert PRESETS["llama3-405b"].parameters == pytest.approx(405.8e9, rel=2e-3)
    deepseek = from_config(DEEPSEEK, "deepseek-v3")
    assert deepseek.parameters == pytest.approx(671e9, rel=2e-3)
    active = deepseek.layers * deepseek.projections + deepseek.mlp_active + 2 * deepseek.head
    assert active == pytest.approx(37e9, rel=3e-2)


def test_mfu_is_the_formula_of_the_papers_results():
    seq, tgs = 2**20, 117.83
    s, h, ffn, layers, vocab = seq, 5120, 13824, 40, 120000
    theirs = 12 * s * layers * h**2 * (2 + 0.5 * s / h + 1.5 * ffn / h + vocab / (2 * layers * h))
    mfu = PRESETS["14b"].flops(seq / 2) * tgs / 312e12
    assert mfu == pytest.approx(theirs * tgs / (s * 312e12), rel=1e-12)
    assert mfu == pytest.approx(0.5168, rel=2e-3)


def test_megatrons_arguments_make_the_model_of_a_config():
    grouped = "--group-query-attention --num-query-groups 4 --ffn-hidden-size 2816"
    model, pinned = model_of(f"{MEGATRON} {grouped} --tensor-model-parallel-size 2")
    config = dict(
        num_hidden_layers=8, hidden_size=1024, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=2816, vocab_size=32000, hidden_act="silu", tie_word_embeddings=True,
    )  # fmt: skip
    assert replace(model, name="x") == from_config(config, "x") and pinned == {"tp": 2}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_of_zero_shards_one_more_state(stage):
    whole, sharded = (
        states(PRESETS["7b"], Way(framework="deepspeed", cp=8, zero=zero)) for zero in (0, stage)
    )
    names = ["optimizer", "gradients", "weights"]
    assert [whole[n] / sharded[n] for n in names] == [8.0] * stage + [1.0] * (3 - stage)


def test_memory_falls_with_what_is_computed_again_and_with_what_is_offloaded():
    way = Way(framework="deepspeed", cp=8, zero=3, recompute="none")
    kept = [replace(way, recompute=word, keep=0.5) for word in ("attention", "segment", "full")]
    sizes = [total(stack(PRESETS["7b"], one, 2**18)) for one in (way, *kept)]
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


def test_attention_again_costs_the_square_of_what_is_not_kept():
    ways = [Way(framework="deepspeed", cp=8, zero=3, recompute=r, keep=0.5)
            for r in ("full", "segment", "attention")]  # fmt: skip
    full, segment, attention = (step(PRESETS["7b"], way, 2**17, PLACE).times.compute for way in ways)
    assert full["attention again"] == pytest.approx(full["attention forward"])
    assert segment["attention again"] == pytest.approx(full["attention again"] / 4)
    assert attention["attention again"] == 0


def test_what_attention_waits_for_has_the_name_of_what_is_there():
    """A ring needs two positions: one rank only launches, and ranks that share all heads exchange them."""
    place = replace(PLACE, ranks=Ranks(4, 4))
    names = {"ring", "kernel launches", "exchange of heads"}
    for degrees, heads, cause in (
        ({"dp": 4}, 1, "kernel launches"),
        ({"cp": 4}, 1, "ring"),
        ({"cp": 4}, 2, "ring"),
        ({"cp": 4}, 4, "exchange of heads"),
    ):
        way = Way(framework="deepspeed", zero=3, **degrees)
        runs = AttentionTime(forward=0.02, backward=0.04, kernel=0.05, head_parallel=heads)
        exposed = PredictedStep(PRESETS["7b"], way, 2**15, place, runs).times.exposed
        assert exposed[cause] == pytest.approx(32 * 0.01), degrees
        assert names & set(exposed) == {cause}


def test_interleaved_stages_wait_less():
    ways = [Way(pp=4, cp=2, micro=8, chunks=chunks, recompute="full") for chunks in (1, 2)]
    plain, interleaved = (step(PRESETS["7b"], way, 2**15, PLACE).times.exposed["pipeline"] for way in ways)
    assert plain == pytest.approx(2 * interleaved)


def test_a_sequence_a_little_longer_than_the_longest_does_not_fit(answer):
    for seq, way in answer.lengths.values():
        sizes = [total(least(PRESETS["7b"], way, n)) for n in (seq, int(seq * 1.02))]
        assert sizes[0] <= PLACE.usable < sizes[1]


def test_every_way_is_ranked_or_has_a_reason(answer):
    assert len(answer.infeasible) > 100 and all(why for _, why in answer.infeasible)
    assert any(why.startswith("out of memory") for _, why in answer.infeasible)
    found = json.loads(json.dumps(answer.as_json()))
    assert found["recommended"]["fits"] and set(found["paste"]) == {"megatron", "deepspeed"}
    assert len(found["ways"]) == len(answer.ranked)


def _parsed(one):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--recompute-modules", nargs="*")
    return add_arguments(parser).parse_known_args(shlex.split(" ".join(megatron_flags(one))))


def test_flags_and_section_say_what_was_predicted(answer):
    ways = {one.way.framework + one.way.recompute + str(one.way.offload_activations): one
            for one in answer.ranked}  # fmt: skip
    for one in ways.values():
        keep = Segment(0.5) if one.way.recompute == "segment" else KeepAttention()
        policy = Offload(keep) if one.way.offload_activations else keep
        kept = one.way.recompute in ("attention", "segment")
        if one.way.framework == "megatron":
            arguments, _ = _parsed(one)
            if one.way.cp > 1:
                assert burst_config(arguments).backward == one.attention.direction
                assert burst_config(arguments).head_parallel == one.attention.head_parallel
            if kept:
                arguments.recompute_granularity = "full"  # as the launcher sets it
                assert recompute_policy(arguments) == policy
        else:
            section = section_of(deepspeed_config(one))
            assert section.attention.ring == one.attention.ring
            assert section.fused_loss == one.way.fused_loss
            if kept:
                assert section.checkpointing.recomputed() == policy


def test_megatron_knows_every_flag_that_is_read_or_advised(answer):
    arguments = pytest.importorskip("megatron.training.arguments")
    from burst_plan.step.model.arguments import OPTIONAL

    known = add_arguments(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = {flag.split()[0] for one in answer.ranked for flag in megatron_flags(one)}
    for flag in flags | {f"--{name}" for name in OPTIONAL}:
        assert flag in known._option_string_actions, flag


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--model": "900z"}, "unknown model '900z': give one of 7b"),
        ({"--model": MEGATRON.replace("--vocab-size 32000 ", "")}, "no --vocab-size"),
        ({"--model": f"{MEGATRON} --num-query-groups 2"}, "without --group-query-attention"),
        ({"--model": f"{MEGATRON} --seq-length 4096"}, "contradicts --seq-length 4096"),
        ({"--model": f"{MEGATRON} --tensor-model-parallel-size 3"}, "no way over 8 ranks with TP 3"),
        ({"--seq": "long"}, "a number of tokens looks like"),
        ({"--cluster": "a800:0x8"}, "a cluster is nodes x ranks"),
        ({"--cluster": "abacus:1x8"}, "unknown machine 'abacus'"),
        ({"--rates": "none.json"}, "none.json is no file of rates"),
        ({"--batch": "0"}, "--batch must be at least 1"),
        ({"--json": "nowhere/plan.json"}, "there is no folder nowhere"),
        ({"--against": "rows.json"}, "give --model MODEL with --seq, or --against FILE"),
    ],
)
def test_bad_input_is_one_line_and_status_2(changes, words):
    options = {"--model": "7b", "--seq": "128K", "--cluster": "a800:1x8", **changes}
    done = CliRunner().invoke(app, ["plan", *(word for pair in options.items() for word in pair)])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert words in done.output


def test_a_plan_prints_and_writes_a_recommendation(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK, "num_hidden_layers": 4}))
    out = tmp_path / "plan.json"
    done = CliRunner().invoke(
        app, ["plan", "--model", str(tmp_path), "--seq", "64K", "--cluster", "h200:1x8", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert f"recommended: {found['recommended']['words']}" in done.output
    assert "longest sequence, megatron" in done.output and "predicted, not measured" in done.output


@pytest.fixture(scope="module")
def million():
    return planned("Llama-3.1-8B", "1M", "h100:4x8", 1, None)


def test_the_recommended_way_is_that_of_its_framework(million):
    """Though a plainer way of the framework is within 5 % of it, which is slower than the fastest of all."""
    words = (
        "megatron, CP 4, TP 8, ZeRO-1, recompute attention, offload activations, whole logits",
        "deepspeed, CP 32, ZeRO-2, recompute segment, keep 0.5, offload activations",
        "deepspeed, CP 32, ZeRO-3, recompute segment, keep 0.5, offload optimizer",
    )
    steps = {str(one.way): one for one in million.ranked}
    fastest, chosen, plainer = (steps[each] for each in words)
    within = 1.05  # of the fastest: a plainer way is taken
    assert chosen.seconds < within * fastest.seconds < plainer.seconds < within * chosen.seconds
    three = replace(million, ranked=[fastest, chosen, plainer])
    assert three.chosen is three.best_of("deepspeed") is chosen and three.best_of("megatron") is fastest


def test_a_plan_prints_the_ways_whose_settings_it_prints(million):
    lines = text(million, 2).splitlines()
    cells = {
        line[:1]: " ".join(line.split()[1:]) for line in lines if line[:1] in ("*", "+") and "x1" in line
    }
    best = {"*": million.chosen, "+": million.best_of("megatron")}
    assert cells.keys() == best.keys() and million.chosen not in million.ranked[:2]
    assert all(cells[mark].startswith(f"{one.way} ") for mark, one in best.items())
    assert f"and {len(million.ranked) - 4} others" in lines
    assert f"{best['+'].way}; add these flags to your model's:" in lines
    assert f"{best['*'].way}; add your optimizer to this JSON:" in lines


def test_ranks_that_do_not_go_evenly_have_a_reason():
    model, ranks = PRESETS["7b"], Ranks(32, 8)
    assert "are not the 32" in why_not(Way(cp=8), model, 2**17, ranks)
    assert "do not divide 40 layers" in why_not(Way(pp=32), PRESETS["14b"], 2**17, ranks)
    assert "multiples of the stages" in why_not(Way(cp=16, pp=2, chunks=2), model, 2**17, ranks)
    assert why_not(Way(cp=16, pp=2, chunks=2, micro=2), model, 2**17, ranks) is None


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("vocab", [256, 6000])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("fused_loss", [False, True])
def test_memory_is_that_of_the_tensors_of_a_model_of_transformers(kv_heads, vocab, recompute, fused_loss):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=192, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=kv_heads,
        intermediate_size=640, vocab_size=vocab, use_cache=False,
    )  # fmt: skip
    predicted, counted = _bytes_of_transformers(transformers, config, recompute, fused_loss)
    assert predicted == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_that_of_the_tensors_of_experts_of_transformers(kind, recompute):
    transformers = pytest.importorskip("transformers")
    experts = {
        "Mixtral": dict(intermediate_size=320, num_local_experts=8, num_experts_per_tok=2),
        "Qwen3Moe": dict(moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4, head_dim=32),
    }
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=192, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2, vocab_size=256,
        use_cache=False, **experts[kind],
    )  # fmt: skip
    predicted, counted = _bytes_of_transformers(transformers, config, recompute, fused_loss=False)
    assert predicted == pytest.approx(counted, rel=0.05)


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
    way = Way(framework="deepspeed", zero=0, recompute=recompute, fused_loss=fused_loss,
              offload_optimizer=True)  # fmt: skip
    sizes = from_config(config.to_dict(), "model")
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    found = {
        name: sum(map(total, stacks)) for name, stacks in moments(sizes, way, 1536, "query", chunks=ON_CPU)
    }
    return (found["forward"], max(found.values())), (forward, live.peak)


def test_live_bytes_are_those_of_storages_that_are_alive():
    with LiveBytes() as live:
        x = torch.zeros(1000)
        assert live.live == live.peak == 4000
        y = x.view(10, 100)
        del x
        assert live.live == 4000
        y = y + 1
        assert (live.live, live.peak) == (4000, 8000)
        del y
        assert live.live == 0


@pytest.mark.parametrize(("mask", "behind"), [("causal", False), ("causal & documents:random,64", True)])
def test_a_plan_names_the_way_of_the_calls_rule_and_settings_where_it_is_behind(mask, behind):
    answer = planned("7b", "256K", "a800:4x8", 1, None, mask)
    runs, (line,) = answer.chosen.attention, [x for x in recommendation(answer) if x.startswith("rule of")]
    shard = replace(shard_of(answer.model, answer.chosen.way, answer.seq), tokens=2**18 // 32)
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
