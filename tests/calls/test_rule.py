"""The rule by which a call chooses: the plainest way of the best, decided once for each kind of question."""

import itertools
from dataclasses import replace

import pytest
import torch

from burst_bench.methods.attention import share_of
from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention import choose as choose_module
from burst_mcore.attention.choose import Candidate, Family, Question, best, decide
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.route import Route
from burst_mcore.rates import CPU, CUDA, Rates
from burst_plan.machines import MACHINES

A800 = Rates(intra=200e9, inter=25e9, compute=156e12)


def _shard(heads, kv_heads, *, tokens=64):
    return share_of(tokens, heads, kv_heads, 128, torch.bfloat16)


def test_a_call_with_one_way_left_counts_nothing(monkeypatch):
    monkeypatch.setattr(choose_module, "candidates", None)
    shard = _shard(8, 8)
    for size, way in ((1, {}), (2, {"backward": "kv"}), (4, {"backward": "query", "ring": "direct"})):
        question = Question(shard, Layout("zigzag"), Mask.causal(), 64 * size, Ranks(size, size), A800)
        route = decide(BurstConfig(**way), question).route
        assert route == Route(1, size, direct=size == 4)


def test_ties_go_to_the_plainest_way_then_to_fewer_bytes():
    """The order of topology.md: each candidate that comes later is 4 % faster and sends fewer bytes."""
    ring = Candidate("double", Route(4, 8), "query", 1.04, 1.0, 1.9, 100, 100, Family.RING)
    flat = replace(ring, ring="flat", route=Route(1, 32))
    mirrored = replace(ring, route=Route(4, 8, mirrored=True))
    within = replace(ring, route=Route(4, 1, 8), family=Family.HEADS_WITHIN)
    direct = replace(ring, ring="direct", route=Route(1, 32, direct=True), family=Family.DIRECT)
    across = replace(ring, route=Route(1, 8, 4, outer=True), family=Family.HEADS_ACROSS)
    order = [ring, flat, within, direct, across]
    for i, one in enumerate(order):
        assert one.route.size == 32 and Family.of(one.route, 8) == one.family
        rest = [replace(c, forward_seconds=1.0, inter_bytes=9 - j) for j, c in enumerate(order[i + 1 :])]
        assert best([*rest[::-1], one]) is one
    fewer = replace(ring, direction="kv", inter_bytes=99, intra_bytes=999)
    assert best([ring, fewer]) is fewer and best([replace(fewer, inter_bytes=100), ring]) is ring
    assert best([replace(ring, direction="kv"), ring]) is ring  # queries, the paper's choice
    assert best([mirrored, ring]) is ring and best([ring, replace(mirrored, intra_bytes=99)]).route.mirrored
    faster = replace(across, forward_seconds=0.9, backward_seconds=1.0)
    assert best([ring, faster]) is faster  # by over 5 %


@pytest.mark.parametrize(
    ("nodes", "intra"),
    [(1, 2), (1, 4), (1, 8), (2, 8), *(pytest.param(n, 8, marks=pytest.mark.slow) for n in (4, 8))],
)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full()], ids=["causal", "full"])
def test_the_plainest_calls_run_rings(nodes, intra, mask):
    """BurstConfig(), zigzag: a ring on one node, the double ring on several, the side with fewer bytes."""
    ranks = Ranks(nodes * intra, intra)
    machines = MACHINES["H100"].rates, MACHINES["L20-PCIe"].rates, CPU
    for rates, kv_heads, n in itertools.product(machines, (32, 8), (2**15, 2**18, 2**20)):
        shard = _shard(32, kv_heads, tokens=n // ranks.size)
        route, direction, _ = decide(BurstConfig(), Question(shard, Layout("zigzag"), mask, n, ranks, rates))
        wanted = Route(nodes, intra), "query" if kv_heads == 32 else "kv"
        assert (replace(route, mirrored=False), direction) == wanted, (rates, kv_heads, n)
        assert not route.mirrored or mask == Mask.causal()


def test_masks_whose_parts_differ_are_counted_on_all_ranks():
    mask = Mask.causal() & Mask.blocks(torch.ones(64, 64).bool(), 8192)
    question = Question(_shard(32, 8, tokens=4096), Layout("zigzag"), mask, 2**19, Ranks(128, 8), CUDA)
    assert question.shortened((1,)) is question
    assert replace(question, mask=Mask.causal()).shortened((1, 16)).ranks.size == 64
