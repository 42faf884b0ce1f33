"""Recompute policies under Megatron's own checkpointing: the gradients of the model without it, for less work."""

from itertools import product

import pytest
import torch
from models import BATCH, N, Case, assert_equal, default, steps

from burst_mcore.checkpointing import Full, KeepAttention, Segment

MICROBATCHES = 2
LAYERS = {"selective": 2, "full": 2, ("uniform", 2): 2, ("block", 1): 1}
"""How Megatron checkpoints, and the layers that it computes again."""
POLICIES = {
    "zigzag": [Full(), KeepAttention(), Segment(0.5)],
    "striped": [Full(), KeepAttention(), Segment(0.25), Segment(0.5)],
}
CELLS = [
    (layout, recompute, policy)
    for layout, policies in POLICIES.items()
    for recompute, policy in product(LAYERS, policies)
]
FEW_ULP = 8 * torch.finfo(torch.float32).eps
"""Of the largest gradient of a parameter, where a front is tiled in another way than the whole."""


def pairs(n=N):
    """Of a query and a key under a causal mask."""
    return n * (n + 1) // 2


def assert_same_gradients(got, want, policy):
    """Those of every parameter, on every rank: to the bit, if attention is tiled in one way."""
    for ours, theirs in zip(got, want, strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            off = (ours.gradients[name] - gradient).abs().max()
            assert off <= (FEW_ULP * gradient.abs().max() if isinstance(policy, Segment) else 0), name


@pytest.fixture(scope="module")
def found():
    """What each cell gave on each rank, and each layout without checkpointing: last microbatch first."""
    case = Case(cp=2, microbatches=MICROBATCHES, lifo=True)
    cases = {(layout, None, None): case._replace(layout=layout) for layout in POLICIES}
    for layout, recompute, policy in CELLS:
        cases[layout, recompute, policy] = case._replace(
            layout=layout, recompute=recompute, policy=policy, strays=True
        )
    return dict(zip(cases, steps(*cases.values()), strict=True))


@pytest.mark.parametrize(("layout", "recompute", "policy"), CELLS, ids=str)
def test_gpt_with_microbatches_in_flight_and_forwards_in_between(found, layout, recompute, policy):
    got, plain = found[layout, recompute, policy], found[layout, None, None]
    assert_equal(got[0], default(microbatches=MICROBATCHES))
    assert_same_gradients(got, plain, policy)
    assert plain[0].recomputed == 0
    front = round(N * (1 - policy.share(0)[0]))
    assert got[0].recomputed == MICROBATCHES * BATCH * LAYERS[recompute] * pairs(front)
