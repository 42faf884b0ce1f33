"""Bytes, time and the choices that follow: pure functions, no process."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from cells import crossed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms
from planned import packed

from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.candidates import (
    RINGS,
    Family,
    Question,
    Ranks,
    Settings,
    legal_degrees,
    route_for,
    settings_of,
)
from burst_mcore.attention.choose import AS_FAST, Candidate, best, decide
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route, program, schedule
from burst_mcore.rates import CPU, Rates
from burst_plan.machines import MACHINES
from burst_plan.simulate.cost import Sizes, allowed_pairs, link_bytes, mean_bytes, message_bytes, pass_flops
from burst_plan.simulate.costing import Costs, work_of
from burst_plan.simulate.lockstep import RoutedPass, _Lockstep, play_all
from burst_plan.simulate.play import play
from burst_plan.simulate.reason import reason
from burst_plan.simulate.search import candidates, costed, fastest

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""By bytes."""


def _shard(heads, kv_heads, *, tokens=64, head_dim=128, s=2, g=4):
    return Shard(
        batch=1,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=DTYPES[s],
        grad_dtype=DTYPES[g],
    )


def _bytes(shard, route, pass_, rank=0, intra=None):
    sent = link_bytes(
        program(rank, route, pass_), rank, message_bytes(shard, route, pass_), intra or route.size
    )
    return sent["intra"], sent["inter"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (4, 1)])
@pytest.mark.parametrize(("s", "g"), [(2, 4), (2, 2), (4, 4)])
def test_bytes_of_a_ring_are_the_formulas(size, heads, kv_heads, s, g):
    shard, n = _shard(heads, kv_heads, s=s, g=g), 64 * size
    d, d_kv = heads * 128, kv_heads * 128
    of_gradients = n // size * ((size - 2) * g + s) if size > 1 else 0  # its own share stays at home
    query = (size - 1) * (n // size) * (2 * d * s + 8 * heads) + d * of_gradients
    kv = 2 * n * d_kv * s * (size - 1) // size + 2 * d_kv * of_gradients
    route = Route(1, size)
    assert _bytes(shard, route, "forward") == (2 * n * d_kv * s * (size - 1) // size, 0)
    assert _bytes(shard, route, "query") == (query, 0)
    assert _bytes(shard, route, "kv") == (kv, 0)


@pytest.mark.parametrize(("nodes", "intra"), [(2, 2), (2, 4), (3, 2), (4, 8)])
def test_bytes_of_a_double_ring_are_the_formulas(nodes, intra):
    heads, s, g = 8, 2, 4
    shard, route, size = _shard(heads, heads, s=s, g=g), Route(nodes, intra), nodes * intra
    d, tokens = heads * 128, 64  # tokens: N / G
    kv, dkv = tokens * 2 * d * s, tokens * 2 * d * g
    q, dq = tokens * (2 * d * s + 8 * heads), tokens * d * g
    for rank in range(size):
        for pass_, data, gradient in (("forward", kv, 0), ("kv", kv, dkv), ("query", q, dq)):
            within, between = _bytes(shard, route, pass_, rank, intra)
            assert between == (nodes - 1) * (data + gradient)
            last = gradient // g * s
            assert within == nodes * (intra - 1) * (data + gradient) - gradient + last


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(8, 8, 4), (8, 2, 4), (8, 1, 8), (32, 8, 2)])
def test_bytes_of_the_head_group_are_the_formulas(heads, kv_heads, degree):
    shard, s, g, tokens = _shard(heads, kv_heads), 2, 4, 64
    others, h = degree - 1, heads // degree
    kv_h = max(1, kv_heads // degree)
    q, kv = tokens * h * 128, tokens * kv_h * 256
    ulysses = Route(1, 1, degree)
    statistic = 4 * tokens * h
    dkv = kv * (g if kv_heads < degree else s)
    assert _bytes(shard, ulysses, "forward") == (others * (q * s + kv * s + q * s), 0)
    for pass_ in ("query", "kv"):
        assert _bytes(shard, ulysses, pass_) == (others * (q * s + statistic + q * s + dkv), 0)


def test_head_x_ring_sends_less_between_nodes():
    shard = _shard(32, 8, tokens=1024)
    inter = [
        _bytes(shard, route_for(h, Ranks(32, 8), ring="double", overlap=True), "kv", intra=8)[1]
        for h in (1, 8)
    ]
    # the NIC of a rank carries as much, fewer heads of more tokens; but the last hop, in 2 bytes, is its own
    assert inter[0] == inter[1] + 1024 * 8 * 2 * 128 * (4 - 2)
    assert route_for(8, Ranks(32, 8), ring="double", overlap=True) == Route(4, 1, 8)
    assert route_for(16, Ranks(32, 8), ring="double", overlap=True) == Route(2, 1, 16)
    assert route_for(32, Ranks(32, 8), ring="double", overlap=True) == Route(1, 1, 32)
    assert route_for(2, Ranks(32, 8), ring="flat", overlap=False) == Route(1, 16, 2, False)
    outer = partial(route_for, ranks=Ranks(32, 8), ring="double", overlap=True, outer=True)
    assert outer(2) == Route(2, 8, 2, outer=True)
    assert outer(4) == Route(1, 8, 4, outer=True)
    assert outer(8) == Route(1, 4, 8, outer=True)
    assert outer(1) == Route(4, 8) and outer(32) == Route(1, 1, 32)
    assert route_for(4, Ranks(12, 6), ring="double", overlap=True) == Route(1, 3, 4)
    assert route_for(4, Ranks(12, 6), ring="double", overlap=True, outer=True) == Route(1, 3, 4, outer=True)


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


# Head groups over nodes that end within a ring: mirrored, their links are those of other ranks.
@example(draw=random.Random(0), route=Route(1, 2, 3, outer=True), direct=False, chunks=1, regular=None)
@settings(max_examples=150, deadline=None)
@given(
    draw=randoms,
    route=st.builds(
        Route,
        st.integers(1, 3),
        st.integers(1, 8),
        st.sampled_from([1, 1, 2, 3, 4]),
        st.booleans(),
        outer=st.booleans(),
    ).filter(lambda route: route.size <= 32),
    direct=st.booleans(),
    chunks=st.integers(1, 6),
    regular=st.sampled_from([None, None, Mask.causal(), Mask.full()]),
)
def test_played_at_once_is_every_rank_played(draw, route, direct, chunks, regular):
    """Random routes, masks, layouts, placements and rates: the time is that of the slowest rank."""
    route = replace(route, direct=True, nodes=1) if direct else route
    n = 2 * chunks * route.size + draw.choice([0, 0, 1])
    layout, mask = random_layout(draw, route.size, n), regular or random_mask(draw, n)
    fits = [
        d
        for d in range(1, route.size + 1)
        if not route.size % d and not (d % route.heads and route.heads % d)
    ]
    rates = Rates(
        intra=draw.choice([1e6, 1e7]),
        inter=draw.choice([1e5, 1e6]),
        compute=draw.choice([1e5, 1e7, 1e9]),
        latency=draw.choice([0.0, 1e-3]),
    )
    kv_heads = route.heads * draw.choice([1, 4])
    for played, end, sent in _played_both_ways(layout, mask, n, route, draw.choice(fits), rates, kv_heads):
        assert played.seconds == pytest.approx(end, rel=1e-9)
        for link, size in sent.items():
            assert played.sent[link] == pytest.approx(size, rel=1e-5, abs=64)


OVER_MANY = {
    "causal": Mask.causal(),
    "window": Mask.window(300, 0),
    "documents": Mask.causal() & Mask.documents([*range(0, 256 * 128, 1000), 256 * 128]),
}


@pytest.mark.parametrize(
    ("route", "mask", "size"),
    crossed(
        ("double", "flat", "head x ring"),
        OVER_MANY,
        (64, 256),
        quick=lambda *cell: (
            cell in {("double", "window", 64), ("flat", "causal", 64), ("head x ring", "documents", 64)}
        ),
    ),
)
def test_large_rings_played_at_once_are_every_rank_played(route, mask, size):
    mask = OVER_MANY[mask]
    route = {"double": Route(size // 8, 8), "flat": Route(1, size), "head x ring": Route(size // 8, 2, 4)}[
        route
    ]
    rates = Rates(intra=1e8, inter=1e7, compute=1e10, latency=1e-4)
    for played, end, _ in _played_both_ways(Layout("zigzag"), mask, 256 * 128, route, 8, rates, 16):
        assert played.seconds == pytest.approx(end, rel=1e-5)


def _choose(shard, ranks, rates, *, mask=None, degrees=None, directions=("query", "kv"), **way):
    mask = mask or Mask.causal()
    found = candidates(
        Question(shard, Layout("zigzag"), mask, shard.tokens * ranks.size, ranks, rates),
        Settings(
            overlap=way.get("overlap", True),
            rings=way.get("rings", ("double",)),
            degrees=tuple(degrees or legal_degrees(ranks, shard.heads, shard.kv_heads)),
            directions=directions,
        ),
    )
    return best(found), found


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
    rates = Rates(
        intra=draw.choice([1e6, 1e7]),
        inter=draw.choice([1e5, 1e6]),
        compute=draw.choice([1e5, 1e7, 1e9]),
        latency=draw.choice([0.0, 1e-3]),
        hidden=draw.choice([True, True, False]),
    )
    tokens = layout.padded(n, ranks.size) // ranks.size
    shard = _shard(16, draw.choice([4, 16]), tokens=tokens, head_dim=16)
    question = Question(shard, layout, mask, n, ranks, rates)
    degrees = tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    options = Settings(overlap=True, rings=RINGS, degrees=degrees, directions=("query", "kv"))
    every, tried = (candidates(question, options, every=all_of_them) for all_of_them in (True, False))
    assert {_way(c) for c in tried} <= {_way(c) for c in every}
    assert _way(best(tried)) == _way(best(every))
    for c in every:
        least = Costs(question, c.route.placement).least(replace(c.route, mirrored=False), c.direction)
        assert least <= c.seconds * (1 + 1e-9)


def _asked_of_many(mask, kv_heads, size):
    n = 4096 * size
    seen = {"documents": packed(n, 0), "window": Mask.window(4095, 0), "full": Mask.full()}
    shard = _shard(32, kv_heads, tokens=4096)
    where, rates = Ranks(size, 8), MACHINES["H100"].rates
    return Question(shard, Layout("zigzag"), seen.get(mask, Mask.causal()), n, where, rates).typical


@pytest.mark.parametrize(
    ("mask", "kv_heads"), [("causal", 8), ("full", 32), ("window", 32), ("documents", 8)]
)
def test_a_search_of_heads_takes_fewer_steps_and_finds_the_same(mask, kv_heads, monkeypatch):
    steps, seconds = [], _Lockstep.seconds
    monkeypatch.setattr(_Lockstep, "seconds", lambda *a: steps.append(a[0].clock.numel()) or seconds(*a))
    question = _asked_of_many(mask, kv_heads, 32)
    options, taken = settings_of(BurstConfig(head_parallel="auto"), question), []
    for every in (True, False):
        candidates.cache_clear()
        found = candidates(question, options, every=every)
        taken.append((sum(steps), len(found), _way(best(found)), best(found).seconds))
        steps.clear()
    (all_steps, all_ways, want, least), (few_steps, few_ways, way, took) = taken
    assert few_steps < all_steps and few_ways < all_ways
    assert way == want and took == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("limit", [0.0, 0.4, 1.1])
def test_a_pass_is_played_to_its_end_or_beyond_the_limit(limit):
    question = _asked_of_many("window", 8, 16)
    for route in (Route(2, 8), Route(2, 4, 2), Route(4, 2, 2, outer=True)):
        costs = Costs(question, route.placement)
        assert costs.play(route, [*Pass][1:]) == [*Pass][1:]
        whole = {key: played.seconds for key, played in costs.played.items()}
        slowest = max(whole.values())
        costs.simulate(route, [*Pass], limit * slowest)
        for key, played in costs.played.items():
            assert played.seconds in (torch.inf, pytest.approx(whole[key], rel=1e-9))
            assert played.seconds < torch.inf or whole[key] > limit * slowest
        ended = {each.seconds < torch.inf for each in costs.played.values()}
        assert ended == {limit > 1} or limit == 0.4


@settings(max_examples=25, deadline=None)
@given(draw=randoms, rows=st.integers(2, 24), regular=st.sampled_from([None, Mask.full(), Mask.causal()]))
def test_a_ring_of_two_needs_neither_a_direct_exchange_nor_its_mirror_image(draw, rows, regular):
    n, ranks = 4 * rows, Ranks(2, draw.choice([1, 2]))
    layout, mask = random_layout(draw, 2, n), regular or random_mask(draw, n)
    rates = Rates(
        intra=draw.choice([1e6, 1e7]),
        inter=draw.choice([1e5, 1e6]),
        compute=draw.choice([1e5, 1e7, 1e9]),
        latency=draw.choice([0.0, 1e-3]),
        hidden=draw.choice([True, False]),
        slowdown=draw.choice([0.0, 0.3]),
        crowding=draw.choice([0.0, 1.0]),
    )
    s, g = draw.choice([(2, 4), (2, 2), (4, 4), (8, 8)])
    shard = _shard(16, draw.choice([4, 16]), tokens=layout.padded(n, 2) // 2, head_dim=16, s=s, g=g)
    question = Question(shard, layout, mask, n, ranks, rates)
    config = BurstConfig(head_parallel=draw.choice([1, "auto"]))
    chosen, few = fastest(config, question), settings_of(config, question)
    every = candidates(question, replace(few, rings=("double", "direct")))
    assert few.rings == ("double",) and _way(chosen) == _way(best(every))
    for side in few.directions:
        ring, direct = (c for c in every if (c.route.heads, c.direction) == (1, side))
        assert direct.route.direct and ring.seconds <= direct.seconds * (1 + 1e-12)
        assert ring.inter_bytes <= direct.inter_bytes and ring.intra_bytes <= direct.intra_bytes
    for route in (Route(1, 2), Route(2, 1)):
        played = [one for one, *_ in _played_both_ways(layout, mask, n, route, ranks.intra, rates)]
        assert not route.has_mirror and len(played) == 6
        for one, mirrored in zip(played[::2], played[1::2], strict=True):
            assert (one.seconds, one.sent) == (pytest.approx(mirrored.seconds), pytest.approx(mirrored.sent))


def _way(c):
    return c.ring, c.route, c.direction


def test_a_search_ends_with_rings_where_the_kernel_hides_messages():
    question = Question(
        _shard(32, 8, tokens=2**17), Layout("zigzag"), Mask.causal(), 2**20, Ranks(8, 8), A800
    )
    options = Settings(overlap=True, rings=RINGS, degrees=(1, 2, 4, 8), directions=("query", "kv"))
    words = [{c.family for c in candidates(question, options, every=every)} for every in (False, True)]
    assert words == [{Family.RING}, {Family.RING, Family.HEADS_WITHIN, Family.DIRECT}]


A800 = Rates(intra=200e9, inter=25e9, compute=156e12)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "g", "ratio", "choice"),
    [(32, 32, 2, 0.76, "query"), (32, 32, 4, 0.67, "query"), (32, 8, 2, 3.03, "kv"), (64, 8, 4, 5.38, "kv")],
)
def test_the_paper_saves_with_as_many_kv_heads_and_loses_with_few(heads, kv_heads, g, ratio, choice):
    shard, size = _shard(heads, kv_heads, g=g), 256  # the ratios are those of a step, without the ends
    query, kv = (_bytes(shard, Route(1, size), pass_)[0] for pass_ in ("query", "kv"))
    assert query / kv == pytest.approx(ratio, abs=0.01)
    chosen, _ = _choose(shard, Ranks(16, 16), A800, degrees=(1,))
    assert chosen.direction == choice


def test_short_sequences_share_heads_and_long_ones_move_the_fewest_bytes():
    short, _ = _choose(_shard(32, 32, tokens=512), Ranks(32, 8), A800)
    assert short.route.heads > 1
    long, found = _choose(_shard(32, 8, tokens=2**20 // 32), Ranks(32, 8), A800)
    assert long.compute_seconds / long.seconds > 0.9
    assert long.seconds <= AS_FAST * min(c.seconds for c in found)
    assert "%" in reason(long, found)


def test_messages_that_take_the_cores_are_not_hidden():
    shard, ranks = _shard(8, 4, tokens=128), Ranks(4, 4)
    sockets = replace(CPU, hidden=True)
    chosen, every = _choose(shard, ranks, CPU)
    assert chosen.route.heads == 4 and not chosen.route.overlap  # the fewest bytes, one tile
    _, hiding = _choose(shard, ranks, sockets)
    for one, other in zip(every, hiding, strict=True):
        assert one.seconds >= other.seconds and one.intra_bytes == other.intra_bytes
    ring = next(c for c in every if c.route.heads == 1 and c.direction == "kv")
    alone = next(c for c in _choose(shard, ranks, sockets, overlap=False)[1]
                 if c.route.heads == 1 and c.direction == "kv")  # fmt: skip
    assert ring.route.overlap and ring.seconds == pytest.approx(alone.seconds)


def test_work_is_counted():
    assert allowed_pairs(Mask.causal(), 8) == 36
    assert allowed_pairs(Mask.full(), 8) == 64
    shard = _shard(4, 2, head_dim=16)
    assert pass_flops(shard, 36, "forward") == 4 * 36 * 4 * 16
    assert pass_flops(shard, 36, "kv") == pass_flops(shard, 36, "query") == 10 * 36 * 4 * 16


CLUSTERS = [
    (2, 8, 200, 2),
    (2, 8, 200, 25),
    (4, 8, 200, 25),
    (2, 4, 0.02, 0.001),
    *((8, 8, 450, 50), (16, 8, 25, 3)),
]
QUICK = dict(zip(CLUSTERS, (8, 32, 8, 32), strict=False))
"""Query heads on each; those on the others are slow."""


@pytest.mark.parametrize(
    ("cluster", "heads"),
    crossed(CLUSTERS, (8, 32), quick=lambda cluster, heads: heads == QUICK.get(cluster)),
    ids=str,
)
def test_a_causal_mask_never_gets_one_flat_ring_across_nodes(cluster, heads):
    (nodes, intra, within, between), kv_heads = cluster, 8
    rates = Rates(intra=within * 1e9, inter=between * 1e9, compute=4e14)
    for tokens in (128, 32768):
        shard, ranks = _shard(heads, kv_heads, tokens=tokens), Ranks(nodes * intra, intra)
        chosen, found = _choose(shard, ranks, rates, rings=RINGS)
        assert chosen.ring != "flat"
        alone, _ = _choose(shard, ranks, rates, rings=RINGS, degrees=(1,))
        assert alone.ring == "double"
        assert chosen.seconds <= AS_FAST * min(c.seconds for c in found)


def test_what_is_as_fast_says_why_it_is_taken():
    ring = Candidate("double", Route(4, 8), "kv", 1.01, 1.0, 1.9, 100, 100, Family.RING)
    flat = Candidate("flat", Route(1, 32), "kv", 1.0, 1.0, 1.9, 120, 110, Family.RING)
    direct = Candidate("direct", Route(1, 32, direct=True), "kv", 1.0, 1.0, 1.9, 50, 50, Family.DIRECT)
    words = reason(ring, [ring, flat])
    assert "as fast as flat" in words and "0.50% slower" in words and "moves 9% fewer bytes between" in words
    assert "a ring is plainer than a direct exchange" in reason(ring, [ring, direct])


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_links_between_nodes_never_count_as_fast_as_nvlink(machine):
    assert machine.rates.inter < machine.rates.intra or not machine.switched
    assert CPU.inter < CPU.intra


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    shard, ranks = _shard(8, 8, tokens=512), Ranks(8, 4)
    want, before = _choose(shard, ranks, A800, rings=RINGS), torch.get_default_dtype()
    candidates.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert _choose(shard, ranks, A800, rings=RINGS) == want
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", True])
def test_rates_are_positive_numbers(value):
    with pytest.raises(ValueError, match="Rates.inter must be a positive number"):
        Rates(intra=1, inter=value, compute=1)
