"""Recompute policies under Megatron's checkpointing: the gradients of the model without it, for less work."""

from itertools import product

import pytest
import torch
from models import (
    BATCH,
    MLA,
    MOE,
    MTP,
    Case,
    N,
    assert_equal,
    assert_same_gradients,
    build,
    default,
    needs_019,
    on_this_cp_rank,
    start_megatron,
    steps,
)
from ranks import processes

from burst_mcore.checkpointing import Full, KeepAttention, RecomputeError, Segment
from burst_mcore.checkpointing.scope import in_backward
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


MLP_TOO, EXPERTS_TOO = ((("recompute_modules", ["core_attn", name]),) for name in ("mlp", "moe"))
ON_ALL_VERSIONS = {
    "sinks": (Case(cp=2, recompute="full", fields=(("softmax_type", "learnable"),)), 2),
    "mlp too": (Case(cp=2, recompute="selective", fields=MLP_TOO), 2),
}
"""Models and what is checkpointed, and how many layers of attention they have."""
FROM_019 = {
    "mla": (Case(cp=2, recompute="full", fields=MLA), 2),
    "moe": (Case(cp=2, model="moe", recompute="full", fields=MOE), 2),
    "moe, experts too": (Case(cp=2, model="moe", recompute="selective", fields=(*MOE, *EXPERTS_TOO)), 2),
    "mtp": (Case(cp=2, model="mtp", recompute="full", fields=MTP), 3),
    "hybrid": (Case(cp=2, model="hybrid", recompute="full"), 2),
}


@pytest.mark.proves("recompute policies, compared with no recompute", "other models at CP 2")
@pytest.mark.parametrize(
    "kinds", [ON_ALL_VERSIONS, pytest.param(FROM_019, marks=needs_019)], ids=["", "0.19"]
)
def test_other_models(kinds):
    """Each without checkpointing, and with each policy."""
    policies, cases = (KeepAttention(), Segment(0.5)), []
    for case, _ in kinds.values():
        cases += [case._replace(recompute=None), *(case._replace(policy=policy) for policy in policies)]
    found = iter(steps(*cases))
    for kind, (_, layers) in kinds.items():
        plain = next(found)
        for policy, front in zip(policies, (0, N // 2), strict=True):
            got = next(found)
            assert_same_gradients(got, plain, policy)
            torch.testing.assert_close(got[0].losses, plain[0].losses, rtol=0, atol=0)
            assert got[0].recomputed == BATCH * layers * pairs(front), (kind, policy)


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
    from megatron.core import parallel_state

    start_megatron(context_parallel_size=size)
    use_recompute(KeepAttention())
    at = torch.arange(N)[None]
    group = parallel_state.get_context_parallel_group()
    batch = on_this_cp_rank({"input_ids": at, "labels": at, "position_ids": at}, group)
    model = build(Case(cp=size, recompute=recompute))
    if rank in who:
        for layer, skips in zip(model.decoder.layers, (first, second), strict=True):
            _skipping(layer, skips)
    loss = model(**batch, attention_mask=None).sum()
    with pytest.raises((RecomputeError, ValueError)) as caught:
        loss.backward()
    return caught.type.__name__, str(caught.value)


NEVER, FORWARD, RECOMPUTATION = (), ("forward",), ("recomputation",)


@pytest.mark.parametrize(
    ("recompute", "first", "second", "words"),
    [
        ("full", FORWARD, NEVER, ["call 1", "of layer 1", "has no record"]),
        (("uniform", 2), FORWARD, RECOMPUTATION, ["call 1", "of layer 1", "layer 1, not layer 2"]),
    ],
    ids=["one more", "another one"],
)
def test_a_changed_control_flow_names_the_layer(recompute, first, second, words):
    for name, message in processes(2, _changes, recompute, first, second, (0, 1)):
        assert name == "RecomputeError"
        assert all(word in message for word in words), message


def test_a_changed_control_flow_of_one_rank_names_the_layer_on_all():
    told = processes(2, _changes, ("uniform", 2), NEVER, RECOMPUTATION, (1,))
    assert all("layer 2" in message for _, message in told), told
