"""Recompute policies under Megatron's checkpointing: the gradients of the model without it, for less work."""

from itertools import product

import pytest
import torch
from models import (
    BATCH,
    MLA,
    MOE,
    MTP,
    VERSION,
    Case,
    N,
    assert_equal,
    assert_same_gradients,
    build,
    default,
    needs_019,
    on_this_cp_rank,
    steps,
)
from ranks import processes

from burst_mcore.checkpointing import Full, KeepAttention, RecomputeError, Segment
from burst_mcore.checkpointing.scope import in_backward
from burst_mcore.megatron import cpu
from burst_mcore.megatron.recompute import use_recompute

MICROBATCHES = 2
LAYERS = {"selective": 2, "full": 2, ("uniform", 2): 2, ("block", 1): 1}
"""How Megatron checkpoints, and how many layers' attention it then computes again."""
POLICIES = {
    "zigzag": [Full(), KeepAttention(), Segment(0.5)],
    "striped": [Full(), KeepAttention(), Segment(0.25), Segment(0.5)],
}
CELLS = [
    (layout, recompute, policy)
    for layout, policies in POLICIES.items()
    for recompute, policy in product(LAYERS, policies)
]


def pairs(n=N):
    """Of a query and a key under a causal mask."""
    return n * (n + 1) // 2


@pytest.fixture(scope="module")
def found():
    """What each cell gave on each rank, and each layout without checkpointing."""
    case = Case(cp=2, microbatches=MICROBATCHES, lifo=True)
    cases = {(layout, None, None): case._replace(layout=layout) for layout in POLICIES}
    for layout, recompute, policy in CELLS:
        cases[layout, recompute, policy] = case._replace(
            layout=layout, recompute=recompute, policy=policy, strays=True
        )
    return dict(zip(cases, steps(*cases.values()), strict=True))


@pytest.mark.proves(
    "recompute policies, compared with no recompute", "zigzag and striped, full and selective"
)
@pytest.mark.parametrize(("layout", "recompute", "policy"), CELLS, ids=str)
def test_gpt_with_microbatches_in_flight_and_forwards_in_between(found, layout, recompute, policy):
    got, plain = found[layout, recompute, policy], found[layout, None, None]
    assert_equal(got[0], default(microbatches=MICROBATCHES))
    assert_same_gradients(got, plain, policy)
    front = round(N * (1 - policy.share(0)[0]))
    assert got[0].recomputed == MICROBATCHES * BATCH * LAYERS[recompute] * pairs(front)
    assert plain[0].recomputed == 0


def modules(*others):
    """Under selective recompute; layernorm and mla_up_proj need TransformerEngine."""
    return (("recompute_modules", ["core_attn", *others]),)


KINDS = {
    "sinks": (Case(recompute="full", fields=(("softmax_type", "learnable"),)), 2),
    "mlp too": (Case(recompute="selective", fields=modules("mlp")), 2),
    "mla": (Case(recompute="full", fields=MLA), 2),
    "moe": (Case(model="moe", recompute="full", fields=MOE), 2),
    "moe, experts too": (Case(model="moe", recompute="selective", fields=(*MOE, *modules("moe"))), 2),
    "mtp": (Case(model="mtp", recompute="full", fields=MTP), 3),
    "hybrid": (Case(model="hybrid", recompute="full"), 2),
}
"""Models and what is checkpointed, and how many layers of attention they have."""
ON_ALL_VERSIONS = "sinks", "mlp too"


@pytest.fixture(scope="module")
def kinds():
    """Each model without checkpointing, and with each policy."""
    cases = {}
    for kind, policy in product(KINDS, (None, KeepAttention(), Segment(0.5))):
        case = KINDS[kind][0]._replace(cp=2)
        if VERSION >= (0, 19) or kind in ON_ALL_VERSIONS:
            alone = policy is None
            cases[kind, policy] = case._replace(recompute=None) if alone else case._replace(policy=policy)
    return dict(zip(cases, steps(*cases.values()), strict=True))


@pytest.mark.proves("recompute policies, compared with no recompute", "other models at CP 2")
@pytest.mark.parametrize("policy", [KeepAttention(), Segment(0.5)], ids=str)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ON_ALL_VERSIONS else needs_019) for kind in KINDS]
)
def test_other_models(kinds, kind, policy):
    got, plain = kinds[kind, policy], kinds[kind, None]
    assert_same_gradients(got, plain, policy)
    torch.testing.assert_close(got[0].losses, plain[0].losses, rtol=0, atol=0)
    assert got[0].recomputed == BATCH * KINDS[kind][1] * pairs(0 if policy == KeepAttention() else N // 2)


@pytest.mark.proves(
    "recompute policies, compared with no recompute", "TP 2 x CP 2 with SP; CP 4 with shared heads"
)
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, cp=2, fields=(("sequence_parallel", True),)),
        pytest.param(
            Case(tp=2, cp=2, fields=(("distribute_saved_activations", True),)), marks=pytest.mark.slow
        ),
        pytest.param(Case(cp=4, hierarchy=(2, 2), burst=(("head_parallel", 2),)), marks=pytest.mark.slow),
    ],
    ids=["tensor and sequence parallel", "activations distributed over tensor parallel", "head x ring"],
)
def test_on_four_ranks(case):
    policies = KeepAttention(), Segment(0.5)
    plain, *found = steps(case, *(case._replace(recompute="full", policy=policy) for policy in policies))
    for policy, got in zip(policies, found, strict=True):
        assert_equal(got[0], default())
        assert_same_gradients(got, plain, policy)
    kept, segment = found
    assert kept[0].recomputed == 0
    heads_apart = 2  # each half of the heads is attended on other ranks
    assert segment[0].recomputed == heads_apart * 2 * BATCH * pairs(N // 2)


@pytest.mark.proves("recompute policies, compared with no recompute", "packed documents")
def test_packed_documents():
    """What is kept is the last documents."""
    documents = 16, 24, 24
    case, policies = Case(cp=2, documents=documents), (KeepAttention(), Segment(0.5))
    plain, *found = steps(case, *(case._replace(recompute="full", policy=policy) for policy in policies))
    for policy, got in zip(policies, found, strict=True):
        assert_equal(got[0], default(documents=documents))
        assert_same_gradients(got, plain, policy)
    assert [got[0].recomputed for got in found] == [0, 2 * (pairs(16) + pairs(24))]


# ---- a layer whose control flow changes ----


def _model(size, recompute, policy):
    """A model over `size` context-parallel ranks, and this rank's part of a batch for it."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    use_recompute(policy)
    at = torch.arange(N)[None]
    batch = {"input_ids": at, "labels": at, "position_ids": at}
    group = parallel_state.get_context_parallel_group()
    return build(Case(cp=size, recompute=recompute)), on_this_cp_rank(batch, group)


def _skipping(layer, skips):
    """Let a layer skip itself in its forward, in its recomputation, or in neither."""
    forward = layer.forward

    def maybe(hidden_states, *args, **kwargs):
        if ("recomputation" if in_backward() else "forward") in skips:
            return hidden_states, None
        return forward(hidden_states, *args, **kwargs)

    layer.forward = maybe


def _changes(rank, size, recompute, first, second, who):
    """What this rank is told if its two layers, where it is among `who`, skip themselves at these times."""
    model, batch = _model(size, recompute, KeepAttention())
    if rank in who:
        for layer, skips in zip(model.decoder.layers, (first, second), strict=True):
            _skipping(layer, skips)
    loss = model(**batch, attention_mask=None).sum()
    try:
        loss.backward()
    except (RecomputeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


NEVER, FORWARD, RECOMPUTATION = (), ("forward",), ("recomputation",)


@pytest.mark.parametrize(
    ("recompute", "first", "second", "words"),
    [
        (("uniform", 2), FORWARD, NEVER, ["call 1", "of layer 1", "layer 1, not layer 2"]),
        ("full", FORWARD, NEVER, ["call 1", "of layer 1", "has no record"]),
        (("uniform", 2), NEVER, RECOMPUTATION, ["made 1 calls", "made 2", "of layer 2"]),
        (("uniform", 2), FORWARD, RECOMPUTATION, ["call 1", "of layer 1", "layer 1, not layer 2"]),
    ],
    ids=["one more", "one more, alone", "one fewer", "another one"],
)
def test_a_changed_control_flow_names_the_layer(recompute, first, second, words):
    everyone, one = (0, 1), (1,)
    for name, message in processes(2, _changes, recompute, first, second, everyone):
        assert name == "RecomputeError"
        assert all(word in message for word in words), message
    if FORWARD not in (first, second):  # a rank that skips a forward is refused there
        told = processes(2, _changes, recompute, first, second, one)
        assert all("layer 2" in message for _, message in told), told


# ---- memory ----


def _storages(rank, size):
    """Shape and bytes of each tensor that is kept, and whether the model saves its storage for itself."""
    kept, saved = [], []

    class Watched(KeepAttention):
        def hold(self, given):
            kept.extend(given.tensors)
            return super().hold(given)

    model, batch = _model(size, "selective", Watched())

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch, attention_mask=None).sum()
    of_others = {x.untyped_storage().data_ptr() for x in saved}
    loss.backward()
    return [(tuple(x.shape), x.nbytes, x.untyped_storage().data_ptr() in of_others) for x in kept]


def test_under_selective_recompute_the_projection_holds_what_is_kept_and_only_lse_is_more():
    batch, rows, heads, dim = 1, N // 2, 4, 16
    out = (batch, rows, heads, dim), batch * rows * heads * dim * 4, True
    lse = (batch, heads, rows), batch * heads * rows * 4, False
    assert processes(2, _storages) == [[out, lse] * 2] * 2
