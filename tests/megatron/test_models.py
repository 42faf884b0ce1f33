"""Training steps with burst attention equal those of CP 1 with Megatron's own attention."""

import pytest
import torch
from models import MLA, MOE, MTP, VERSION, Case, N, assert_equal, build, default, needs_019, step, steps
from ranks import processes

from burst_mcore import positions
from burst_mcore.checkpointing import Segment
from burst_mcore.megatron import cpu

SLOW = pytest.mark.slow


def test_the_baseline_is_megatrons_own_attention():
    assert set(default().core_attentions) == {"DotProductAttention"}
    assert default().losses.isfinite().all()


@pytest.mark.proves("GPT", "CP 1, 2, 4; TP 2 x CP 2; backward by queries, by keys and values")
@pytest.mark.parametrize(
    ("cp", "tp", "backward"),
    [
        *((1, 1, "query"), (2, 1, "kv"), (4, 1, "query"), (2, 2, "kv")),
        *(
            pytest.param(*cell, marks=SLOW)
            for cell in ((1, 1, "kv"), (2, 1, "query"), (4, 1, "kv"), (2, 2, "query"))
        ),
    ],
)
def test_gpt(cp, tp, backward):
    assert_equal(step(Case(tp=tp, cp=cp, backward=backward)), default())


WAYS = {
    "double ring": {"hierarchy": (2, 2)},
    "double ring of 1 x 4": {"hierarchy": (4, 1)},
    "flat ring on hierarchical groups": {"hierarchy": (2, 2), "burst": (("ring", "flat"),)},
    "head x ring": {"hierarchy": (2, 2), "burst": (("head_parallel", 2),)},
    "heads across nodes": {
        "hierarchy": (2, 2),
        "burst": (("head_parallel", 2), ("head_placement", "outer")),
    },
    "Ulysses": {"burst": (("head_parallel", 4),)},
    "auto, no overlap": {"burst": (("head_parallel", "auto"), ("overlap", False))},
}
LESS = {"double ring of 1 x 4", "flat ring on hierarchical groups", "heads across nodes"}
"""Ways that differ little from others."""


@pytest.mark.proves("GPT", "CP 4 on a flat and a double ring, with shared heads, by auto")
@pytest.mark.parametrize("way", [pytest.param(way, marks=[SLOW] * (way in LESS)) for way in WAYS])
def test_gpt_on_other_routes(way):
    assert_equal(step(Case(cp=4, **WAYS[way])), default())


@pytest.mark.proves("GPT", "TP 2 with shared heads on a double ring")
def test_gpt_with_tensor_parallelism_on_a_double_ring_that_shares_heads():
    case = Case(tp=2, cp=4, hierarchy=(2, 2), burst=(("head_parallel", 2),))
    assert_equal(step(case), default())


@pytest.mark.proves("GPT", "full and selective recompute, several microbatches in flight")
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gpt_with_recompute_and_microbatches_in_flight(recompute):
    got = step(Case(cp=2, recompute=recompute, microbatches=2))
    assert_equal(got, default(microbatches=2))


@pytest.mark.proves("MoE; multi-token prediction", "CP 2")
@needs_019
@pytest.mark.parametrize(("model", "fields"), [("moe", MOE), ("mtp", MTP)], ids=["moe", "mtp"])
def test_moe_and_mtp(model, fields):
    assert_equal(step(Case(model=model, cp=2, fields=fields)), default(model=model, fields=fields))


@pytest.mark.proves("MLA", "CP 2")
@needs_019
def test_mla():
    # Megatron's local attention does not build in an MLA layer: the baseline is ours on one rank.
    assert_equal(step(Case(cp=2, fields=MLA)), step(Case(cp=1, fields=MLA)))


@pytest.mark.proves("MLA", "the latent rotates: CP 1, 2, 4; TP 2 x CP 2, sequence parallelism; shared heads")
@pytest.mark.parametrize(
    ("tp", "cp", "backward", "others"),
    [
        (1, 1, "auto", {}),
        pytest.param(1, 2, "query", {}, marks=SLOW),
        (1, 2, "kv", {"recompute": "selective"}),
        (1, 4, "kv", {"recompute": "full", "policy": Segment(0.5), "layout": "striped"}),
        pytest.param(1, 4, "query", {"hierarchy": (2, 2), "burst": (("head_parallel", 2),)}, marks=SLOW),
        pytest.param(2, 2, "kv", {}, marks=SLOW),
        (2, 2, "query", {"sequence_parallel": True}),
    ],
)
def test_the_latent_of_mla_rotates(tp, cp, backward, others):
    others = dict(others)
    fields = (*MLA, *((("sequence_parallel", True),) if others.pop("sequence_parallel", False) else ()))
    case = Case(tp=tp, cp=cp, backward=backward, fields=fields, **others)
    got, want = steps(case._replace(mla_latent="on"), case)
    assert_equal(got[0], want[0])
    assert (got[0].latents, want[0].latents) == (2, 0)
    for rank in range(tp):  # every parameter, summed over CP as Megatron's own reduction of gradients does
        for name in want[rank].gradients:
            ours, theirs = (sum(each.gradients[name] for each in of[rank::tp]) for of in (got, want))
            assert (ours - theirs).norm() <= 2e-6 * theirs.norm(), name


@pytest.mark.proves("attention sinks, off-by-one and learnable", "CP 2")
@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_sinks(kind):
    fields = (("softmax_type", kind),)
    got, want = step(Case(cp=2, fields=fields)), default(fields=fields)
    assert_equal(got, want)
    assert (kind == "learnable") == any("softmax_offset" in name for name in want.norms)


def _init(weight):
    """Weights are drawn whole, on any number of ranks; sinks, which a rank makes of its heads, are alike."""
    fill = torch.nn.init
    return fill.normal_(weight, std=0.02) if weight.dim() > 1 else fill.constant_(weight, 0.3)


def _norm_for_clipping(rank, size):
    """Megatron's norm of the gradients of learnt sinks."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = build(Case(tp=size, fields=(("softmax_type", "learnable"), ("init_method", _init))))
    tokens, at = torch.arange(N)[None], torch.arange(N)[None]
    model(tokens, at, None, labels=tokens + 1).sum().backward()
    sinks = [x for name, x in model.named_parameters() if name.endswith("softmax_offset")]
    counted = [x.grad for x in sinks if param_is_not_tensor_parallel_duplicate(x)]
    group = parallel_state.get_tensor_model_parallel_group()
    return get_grad_norm_fp32(counted or torch.zeros(1), grad_stats_parallel_group=group)


def test_the_norm_for_clipping_has_the_sinks_of_all_tensor_parallel_ranks():
    (want,) = processes(1, _norm_for_clipping)
    assert processes(2, _norm_for_clipping) == [pytest.approx(want, rel=1e-5)] * 2


@pytest.mark.proves("HybridModel of attention and MLP layers", "CP 2")
@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel is there from 0.19 on")
def test_hybrid():
    assert_equal(step(Case(model="hybrid", cp=2)), default(model="hybrid"))


GDN = (
    ("experimental_attention_variant", "gated_delta_net"),
    ("linear_attention_freq", 2),
    ("linear_conv_kernel_dim", 4),
    ("linear_key_head_dim", 16),
    ("linear_value_head_dim", 16),
    ("linear_num_key_heads", 4),
    ("linear_num_value_heads", 4),
    ("deterministic_mode", True),
)
KINDS = {
    "experts": ("*E*E", (("num_layers", 4), *MOE), {"layout": "striped"}),
    "gated delta net": ("G-*-", (("num_layers", 4), *GDN), {}),
    "MLA and experts": ("+E+-", (("num_layers", 4), *MLA, *MOE), {"mla_latent": "on"}),
    "multi-token prediction": ("*-*E/*-", (("num_layers", 4), *MOE, *MTP), {"fused": True}),
    "windows": ("*-*-*-", (("num_layers", 6), ("window_size", (9, 0)), ("window_attn_skip_freq", 3)), {}),
}


@pytest.mark.proves("HybridModel", "experts, MLA whose latent rotates, gated delta net, MTP, windows at CP 2")
@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel is there from 0.19 on")
@pytest.mark.parametrize("name", KINDS)
def test_hybrids_of_other_layers(name):
    pattern, fields, how = KINDS[name]
    case = Case(model="hybrid", pattern=pattern, fields=fields)
    # Megatron's local attention does not build in an MLA layer: the baseline is ours on one rank.
    want = step(case._replace(attention="burst" if "+" in pattern else "default"))
    got = step(case._replace(cp=2, **how))
    for gate in ("decoder.layers.0.self_attention.A_log", "decoder.layers.0.self_attention.dt_bias"):
        # Of parts that cancel: what is left, 1e-4 of other gradients, has the rounding of the parts.
        assert got.norms.pop(gate, 0) == pytest.approx(want.norms.pop(gate, 0), abs=1e-8)
    assert_equal(got, want)


def _by_a_schedule_plan(rank, size):
    """Losses of a model of experts, and of what --overlap-moe-expert-parallel-comm calls in its place."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    parallel_state.initialize_model_parallel(context_parallel_size=size, expert_model_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    set_streams()
    experts = (*MOE, ("moe_token_dispatcher_type", "alltoall"), ("expert_model_parallel_size", size))
    model = build(Case(cp=size, fields=experts))
    at = positions(N, rank=rank, size=size, layout="zigzag")[None]
    want = model(at, at, None, labels=at)
    want.sum().backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    plan = model.build_schedule_plan(at, at, None, labels=at)
    got = TransformerModelChunkSchedulePlan.run(plan, None)
    TransformerModelChunkSchedulePlan.run(None, plan, b_grad=torch.ones_like(got))
    torch.testing.assert_close(got, want)
    for name, gradient in gradients.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, msg=name)


@pytest.mark.proves("MoE; multi-token prediction", "`--overlap-moe-expert-parallel-comm` at CP 2")
@needs_019
def test_experts_whose_messages_overlap():
    processes(2, _by_a_schedule_plan)
