"""A whole call is planned in time: cold once, and warm at every layer."""

import random
import time

import pytest
import torch

from burst_mcore import BurstConfig, Layout, Mask, Topology
from burst_mcore.attention import arguments
from burst_mcore.attention.arguments import call_for, checked, signature, signature_of_call
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.schedule import program

RANKS, TOKENS = 64, 2**20


def _packed(documents, seed):
    cuts = random.Random(seed).sample(range(1, TOKENS), documents - 1)
    return Mask.causal() & Mask.documents([0, *sorted(cuts), TOKENS])


def _planned(mask, layout):
    """All that a call does before it sends, on rank 3 of 8 x 8."""
    topology = Topology(rank=3, size=RANKS, intra_size=8)
    q = torch.empty(1, TOKENS // RANKS, 32, 128, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(1, TOKENS // RANKS, 8, 128, dtype=torch.bfloat16, device="meta")
    config = BurstConfig(layout=layout)

    def plan():
        asked = checked(q, kv, kv, topology, mask, None, None, None, config, False)
        signature(asked, True)
        call = call_for(asked, [TOKENS // RANKS] * RANKS)
        signature_of_call(call)
        return call, [program(3, call.route, name, call.plan) for name in ("forward", call.direction)]

    return plan


def _tiles(call):
    return [call.tiles(3, source) for source in range(RANKS)]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    """Nothing is computed: tensors are on no device, and the ring has no process group."""
    monkeypatch.setattr(arguments, "_check_group", lambda *_: None)
    monkeypatch.setattr(arguments, "choose", lambda *_: KERNELS["aten-cpu"])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "for_mask"])
def test_ten_thousand_documents_are_planned_within_two_seconds(layout):
    mask = _packed(10_000, seed=layout)
    start = time.process_time()
    dealt = Layout.for_mask(mask, TOKENS, RANKS) if layout == "for_mask" else layout
    call, _ = _planned(mask, dealt)()
    _tiles(call)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("striped", marks=pytest.mark.slow), "for_mask"])
def test_a_warm_call_is_planned_within_100_microseconds(layout):
    mask = _packed(1000, seed=layout)
    plan = _planned(mask, Layout.for_mask(mask, TOKENS, RANKS) if layout == "for_mask" else layout)
    (call, steps), (again, steps_again) = plan(), plan()
    assert call.plan is again.plan
    assert all(a is b for a, b in zip(steps, steps_again, strict=True))
    assert all(a is b for a, b in zip(_tiles(call), _tiles(again), strict=True))
    took = []
    for _ in range(500):  # other work beside makes a call longer, never shorter
        start = time.perf_counter()
        plan()
        took.append(time.perf_counter() - start)
    assert min(took) < 100e-6
