"""Bytes, time and the choices that follow: pure functions, no process."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms
from planned import packed

from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.choose import Question, Settings, best, decide
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import Route, schedule
from burst_mcore.config import RINGS
from burst_mcore.rates import Rates
from burst_plan.simulate.cost import Sizes, mean_bytes, message_bytes
from burst_plan.simulate.costing import Costs, work_of
from burst_plan.simulate.lockstep import RoutedPass, play_all
from burst_plan.simulate.play import play
from burst_plan.simulate.search import candidates, costed

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""By bytes."""


def _shard(heads, kv_heads, *, tokens=64, head_dim=128, s=2, g=4):
    dims = {"head_dim": head_dim, "value_dim": head_dim, "dtype": DTYPES[s], "grad_dtype": DTYPES[g]}
    return Shard(batch=1, tokens=tokens, heads=heads, kv_heads=kv_heads, **dims)


def _rates(draw, **further):
    """Links and kernels of which any may be the slowest."""
    links = {"intra": draw.choice([1e6, 1e7]), "inter": draw.choice([1e5, 1e6])}
    compute, latency = draw.choice([1e5, 1e7, 1e9]), draw.choice([0.0, 1e-3])
    return Rates(**links, compute=compute, latency=latency, **further)


RATES = Rates(intra=100.0, inter=10.0, compute=1.0, latency=0.0)


def _play(route, pass_, compute, *, data, gradient=0, intra):
    sizes = Sizes({"data": data, "gradient": gradient, "total": gradient}, 1)
    return play(schedule(route, pass_), sizes, lambda rank, action: compute, intra, RATES).seconds


@pytest.mark.parametrize(("nodes", "intra"), [(2, 2), (2, 4), (3, 2), (4, 4)])
@pytest.mark.parametrize("compute", [0.0, 0.3, 1.0, 5.0])
def test_time_of_a_forward_is_the_formula(nodes, intra, compute):
    size, data = nodes * intra, 20
    within, between = data / RATES.intra, data / RATES.inter
    inner = (intra - 1) * max(compute, within) + compute
    double = (nodes - 1) * max(inner, between) + inner
    assert _play(Route(nodes, intra), "forward", compute, data=data, intra=intra) == pytest.approx(double)
    # Flat: every block crosses the slow links, and in the steady state all wait for them.
    flat = (size - 1) * max(compute, between) + compute
    assert _play(Route(1, size), "forward", compute, data=data, intra=intra) == pytest.approx(flat)
    alone = _play(Route(nodes, intra, overlap=False), "forward", compute, data=data, intra=intra)
    assert alone == pytest.approx(size * compute + nodes * (intra - 1) * within + (nodes - 1) * between)


def _played_both_ways(layout, mask, n, route, node, rates, kv_heads=4):
    """(played for all at once, the last event where every rank is played, bytes a rank), by pass."""
    plan = plan_of(layout, mask, n, route.placement)
    shard = _shard(4 * route.heads, kv_heads, tokens=layout.padded(n, route.size) // route.size, head_dim=16)
    pairs, passes = pairs_between(layout, mask, n, route.size), []
    for pass_ in Pass:
        if not route.direct or bool(plan.reading(of_queries=pass_ == "query").meets.all()):
            for way in (route,) if route.direct else (route, replace(route, mirrored=True)):
                stays = pairs.T if pass_ == "query" else pairs
                sizes = message_bytes(shard, way, pass_)
                passes.append(RoutedPass(way, pass_, sizes, work_of(shard, stays, way, pass_, rates)))
    for each, played in zip(passes, play_all(plan, passes, node, rates), strict=True):
        drawn = schedule(each.route, each.pass_, plan)
        timeline = play(drawn, each.sizes, each.work.of_action, node, rates)
        yield played, timeline.seconds, mean_bytes(drawn.programs, each.sizes, node)


NODES, HEADS = st.integers(1, 3), st.sampled_from([1, 1, 2, 3, 4])


# Head groups over nodes that end within a ring: mirrored, their links are those of other ranks.
@example(draw=random.Random(0), route=Route(1, 2, 3, outer=True), direct=False, chunks=1, regular=None)
@settings(max_examples=150, deadline=None)
@given(
    draw=randoms,
    route=st.builds(Route, NODES, st.integers(1, 8), HEADS, st.booleans(), outer=st.booleans()).filter(
        lambda route: route.size <= 32
    ),
    direct=st.booleans(),
    chunks=st.integers(1, 6),
    regular=st.sampled_from([None, None, Mask.causal(), Mask.full()]),
)
def test_played_at_once_is_every_rank_played(draw, route, direct, chunks, regular):
    """Random routes, masks, layouts, placements and rates: the time is that of the slowest rank."""
    route = replace(route, direct=True, nodes=1) if direct else route
    n = 2 * chunks * route.size + draw.choice([0, 0, 1])
    layout, mask = random_layout(draw, route.size, n), regular or random_mask(draw, n)
    divisors = [d for d in range(1, route.size + 1) if route.size % d == 0]
    fits = [d for d in divisors if not (d % route.heads and route.heads % d)]
    rates = _rates(draw)
    kv_heads = route.heads * draw.choice([1, 4])
    for played, end, sent in _played_both_ways(layout, mask, n, route, draw.choice(fits), rates, kv_heads):
        assert played.seconds == pytest.approx(end, rel=1e-9)
        for link, size in sent.items():
            assert played.sent[link] == pytest.approx(size, rel=1e-5, abs=64)


@settings(max_examples=20, deadline=None)
@given(
    draw=randoms,
    size=st.sampled_from([2, 4, 6, 8, 12]),
    intra=st.sampled_from([1, 2, 3, 4]),
    chunks=st.integers(1, 4),
    regular=st.sampled_from([None, None, Mask.causal(), Mask.causal() & Mask.window(3, 0)]),
)
def test_a_search_that_ends_early_finds_the_same(draw, size, intra, chunks, regular):
    ranks = Ranks(size, intra if size % intra == 0 else size)
    n = 2 * chunks * ranks.size
    layout, mask = random_layout(draw, ranks.size, n), regular or random_mask(draw, n)
    rates = _rates(draw, hidden=draw.choice([True, True, False]))
    tokens = layout.padded(n, ranks.size) // ranks.size
    shard = _shard(16, draw.choice([4, 16]), tokens=tokens, head_dim=16)
    question = Question(shard, layout, mask, n, ranks, rates)
    degrees = tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    options = Settings(overlap=True, rings=RINGS[1:], degrees=degrees, directions=("query", "kv"))
    every, tried = (candidates(question, options, every=all_of_them) for all_of_them in (True, False))
    assert {_way(c) for c in tried} <= {_way(c) for c in every}
    assert _way(best(tried)) == _way(best(every))
    for c in every:
        least = Costs(question, c.route.placement).least(replace(c.route, mirrored=False), c.direction)
        assert least <= c.seconds * (1 + 1e-9)


def _way(c):
    return c.ring, c.route, c.direction


A800 = Rates(intra=200e9, inter=25e9, compute=156e12)


@pytest.mark.parametrize(("size", "inter"), [(16, 25e9), (64, 25e9), (16, 2e9)])
def test_what_is_decided_for_a_kind_of_documents_is_nearly_the_best_for_each(size, inter):
    rates, n = replace(A800, inter=inter), 4096 * size
    shard, ranks, layout = _shard(32, 8, tokens=4096), Ranks(size, 8), Layout("zigzag")

    for seed in range(3):
        question = Question(shard, layout, packed(n, seed), n, ranks, rates)
        (route, direction, _), real = decide(BurstConfig(), question), costed(BurstConfig(), question)
        same = next(
            c for c in real if c.direction == direction and replace(c.route, mirrored=route.mirrored) == route
        )
        assert same.seconds <= 1.1 * min(c.seconds for c in real)
