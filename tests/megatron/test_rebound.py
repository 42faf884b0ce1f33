"""Groups that are bound anew to a built model: attention and positions follow, or the call is refused."""

import copy
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from models import (
    MLA,
    VERSION,
    Case,
    N,
    _in_megatron,
    build,
    let_mla_be_local,
    megatron_on,
    needs_019,
    packed_seq_params,
)
from ranks import processes
from test_core_attention import _core

from burst_mcore import Layout, shard
from burst_mcore.megatron.layouts import use_layout

YARN = (*MLA[:-1], ("rope_type", "yarn"))
LONG = (44, 20)
"""Documents of which one is longer than a rank's share."""


def bind(model, group):
    """Bind a group as Megatron-Bridge's evaluation does: to all modules but rotary embeddings."""
    groups = copy.copy(model.pg_collection)
    groups.cp = group
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.forward.cache_clear()
            continue
        if hasattr(module, "pg_collection"):
            module.pg_collection = groups
        if hasattr(module, "cp_group"):
            module.cp_group = group
        if hasattr(module, "set_context_parallel_group"):
            ranks = dist.get_process_group_ranks(group)
            module.set_context_parallel_group(group, ranks, None, module.cp_comm_type)


def _made(case):
    torch.manual_seed(0)
    use_layout(case.layout)
    return build(case)


def _ran(model, case, group):
    """Logits and gradients of the sequence's share of this rank of `group`."""
    batch = 1 if case.documents else 2
    tokens = torch.randint(0, 96, (batch, N), generator=torch.Generator().manual_seed(2))
    weights = torch.randn(batch, N, 96, generator=torch.Generator().manual_seed(3))
    at, layout, packed = torch.arange(N).expand(batch, -1), Layout.of(case.layout), {}
    if case.documents:
        packed = {"packed_seq_params": packed_seq_params(case)}
        layout = Layout("zigzag-documents", ends=(0, *torch.tensor(case.documents).cumsum(0).tolist()))
    sharded = (
        shard(x, 1, rank=group.rank(), size=group.size(), layout=layout) for x in (tokens, at, weights)
    )
    tokens, at, weights = sharded if group.size() > 1 else (tokens, at, weights)
    model.zero_grad()
    logits = model(tokens, at, None, **packed)
    (logits * weights).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad.clone()
        dist.all_reduce(gradients[name], group=group)
    return logits.detach(), gradients, layout


def _same(got, want, group):
    layout = got[2]
    share = shard(want[0], 1, rank=group.rank(), size=group.size(), layout=layout)
    torch.testing.assert_close(got[0], share, rtol=1e-4, atol=1e-5)
    for name, gradient in want[1].items():
        off = (got[1][name] - gradient).abs().max()
        assert off <= 2e-5 * gradient.abs().max(), name


def _alone():
    ones = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return ones[dist.get_rank()]


def _rebound(cases):
    if VERSION < (0, 19):
        let_mla_be_local()
    alone, pair = _alone(), dist.new_group([0, 1])
    for case in cases:
        model = _made(case)
        built = model.pg_collection.cp
        whole = _ran(model, case, built)
        bind(model, pair)
        _same(_ran(model, case, pair), whole, pair)
        assert model.config.context_parallel_size == 1  # as it was
        bind(model, alone)
        again = _ran(model, case, alone)
        assert torch.equal(again[0], whole[0])
        bind(model, pair)
        _same(_ran(model, case, pair), whole, pair)
        bind(model, built)
        assert torch.equal(_ran(model, case, built)[0], whole[0])


CASES = {
    "rope": [Case(), Case(layout="striped"), Case(recompute="full")],
    "no positions": [Case(position="none"), Case(position="learned_absolute")],
    "packed": [Case(documents=LONG), Case(documents=(4, 12, 48), layout="zigzag")],
    "MLA": [
        Case(fields=MLA),
        Case(fields=YARN),
        Case(fields=MLA, documents=LONG),
        Case(fields=YARN, documents=LONG),
    ],
    "MLA whose latent rotates": [Case(fields=MLA, mla_latent="on")],
    "hybrid": [Case(model="hybrid"), Case(model="hybrid", layout="contiguous")],
}
NEW = {"MLA", "MLA whose latent rotates", "hybrid"}


@pytest.mark.proves(
    "groups bound anew, as Megatron-Bridge does to evaluate", "CP 1 to 2 and back; MLA, hybrid, packed"
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_019] * (name in NEW)) for name in CASES])
def test_a_model_built_at_one_rank_is_evaluated_by_two(name):
    processes(2, _in_megatron, _rebound, 1, CASES[name])


@pytest.mark.proves("groups bound anew, as Megatron-Bridge does to evaluate", "CP 2 to 1 and back")
@megatron_on(2)
def test_a_model_built_at_two_ranks_is_evaluated_by_one():
    case = Case(cp=2)
    model, alone = _made(case), _alone()
    pair = model.pg_collection.cp
    part = _ran(model, case, pair)
    bind(model, alone)
    _same(part, _ran(model, case, alone), pair)
    bind(model, pair)
    assert torch.equal(_ran(model, case, pair)[0], part[0])


@megatron_on(1, size=2)
def test_core_attention_has_the_method_of_transformer_engines():
    """Core attention without a layer of Megatron's, bound as TransformerEngine's is."""
    core, pair = _core(), dist.new_group([0, 1])
    qkv = torch.randn(3, 16, 1, 4, 16, generator=torch.Generator().manual_seed(1))
    whole = core(*qkv, None)
    place = {"rank": dist.get_rank(), "size": 2, "layout": "zigzag"}
    want, held = shard(whole, 0, **place), [shard(x, 0, **place) for x in qkv]
    core.set_context_parallel_group(pair, [0, 1], None, "p2p")
    torch.testing.assert_close(core(*held, None), want)
    core.set_context_parallel_group(pair, [0, 1], None, "a2a")
    assert (core.burst_config.head_parallel, core.cp_comm_type) == (2, "a2a")
    torch.testing.assert_close(core(*held, None), want)
    with pytest.raises(ValueError, match="layer 1: burst attention takes one context-parallel group, got 2"):
        core.set_context_parallel_group([pair, pair])
    with pytest.raises(ValueError, match=r"cp_global_ranks are \[1, 0\], but the group has ranks \[0, 1\]"):
        core.set_context_parallel_group(pair, [1, 0])
    with pytest.raises(ValueError, match="unknown --cp-comm-type ring"):
        core.set_context_parallel_group(pair, [0, 1], None, "ring")
    assert core.cp_comm_type == "a2a"
    core.set_context_parallel_group(None)
    assert core.cp_group is None
    torch.testing.assert_close(core(*qkv, None), whole)


def _mamba(group, size):
    """Megatron's MambaMixer, unbuilt: it needs packages for GPUs."""
    from megatron.core.ssm.mamba_mixer import MambaMixer

    mixer = object.__new__(MambaMixer)
    torch.nn.Module.__init__(mixer)
    mixer.__dict__["cp"] = Namespace(cp_group=group, cp_size=size)
    return mixer


@megatron_on(1, size=2)
def test_a_group_that_is_bound_to_some_modules_alone_is_refused():
    model, pair = build(Case()), dist.new_group([0, 1])
    groups = copy.copy(model.pg_collection)
    groups.cp = pair
    tokens, at = torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None]
    layer, me = model.decoder.layers[0].self_attention, dist.get_rank()
    before = layer.pg_collection

    layer.pg_collection = groups
    with pytest.raises(ValueError, match=rf"layer 1: .* \[0, 1\], that of its core attention \[{me}\]: bind"):
        model(tokens, at, None)
    layer.core_attention.pg_collection = groups
    with pytest.raises(ValueError, match=rf"layer 1: .* \[0, 1\], that of its model \[{me}\]: bind one"):
        model(tokens, at, None)
    layer.pg_collection, layer.core_attention.cp_group = before, before.cp
    assert model(tokens, at, None).isfinite().all()
    call = packed_seq_params(Case(documents=LONG))
    call.local_cp_size, call.cp_group = 1, _alone()
    said = rf"MambaMixer keeps the context-parallel group of its constructor, of size 2, but the .* \[{me}\]"
    with pytest.raises(ValueError, match=said):
        _mamba(pair, 2)(packed_seq_params=call)
    model.decoder.layers[1].mlp.register_forward_pre_hook(lambda *_: _mamba(before.cp, 1)())
    bind(model, pair)
    with pytest.raises(ValueError, match=r"build_schedule_plan .* bound anew, to ranks \[0, 1\]: call the"):
        model.build_schedule_plan(tokens, at, None)
    with pytest.raises(ValueError, match=r"MambaMixer keeps .* of size 1, but the model has ranks \[0, 1\]"):
        model(tokens, at, None)
