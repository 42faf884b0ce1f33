"""Closed formulas for bytes, held against programs by link and dtype, and the bound; what auto takes."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from volume import Share, least, moved, of_mesh, of_ring, through_nic

from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.autotune.cost import mean_bytes, message_bytes
from burst_mcore.attention.autotune.decide import decide
from burst_mcore.attention.autotune.question import Question
from burst_mcore.attention.autotune.ways import Ranks, factors, legal_degrees, route_for
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.route import Route, schedule
from burst_mcore.attention.shard import Shard
from burst_mcore.rates import Rates

DTYPES = {
    "bf16, sums in float32": (torch.bfloat16, torch.float32),
    "bf16, sums in bf16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
}
HEADS = ((8, 8), (8, 2), (12, 4), (16, 1))
CLUSTERS = [Ranks(n * intra, intra) for n in (1, 2, 3, 4) for intra in (1, 2, 3, 4, 8)]


def _shard(heads, kv_heads, dtypes):
    dtype, grad_dtype = dtypes
    return Shard(
        batch=2, tokens=5, heads=heads, kv_heads=kv_heads, head_dim=24, value_dim=16,
        dtype=dtype, grad_dtype=grad_dtype,
    )  # fmt: skip


def _routes(ranks, heads, kv_heads):
    """All rings, with heads shared by neighbours or across nodes, that nodes cut into equal parts."""
    for degree in legal_degrees(ranks, heads, kv_heads):
        for ring in ("flat", "double"):
            for outer in (False, True):
                route = route_for(degree, ranks, ring=ring, overlap=True, outer=outer)
                block = route.positions if route.outer else degree
                if block % ranks.intra == 0 or ranks.intra % block == 0:
                    yield route


@pytest.mark.parametrize("ranks", CLUSTERS, ids=lambda ranks: f"{ranks.size // ranks.intra}x{ranks.intra}")
def test_the_programs_send_the_bytes_of_the_formulas(ranks):
    routes = {(shape, route) for shape in HEADS for route in _routes(ranks, *shape)}
    for (shape, route), pass_ in ((each, pass_) for each in routes for pass_ in Pass):
        programs = schedule(route, pass_).programs
        for name, dtypes in DTYPES.items():
            shard = _shard(*shape, dtypes)
            counted = mean_bytes(programs, message_bytes(shard, route, pass_), ranks.intra)
            formula = of_ring(Share.of(shard), pass_, route, ranks.intra)
            for link in (Link.INTRA, Link.INTER):
                assert formula[link] == pytest.approx(counted[link], rel=1e-12), (
                    shape,
                    route,
                    pass_,
                    name,
                    link,
                )


def _meshes(ranks, heads, kv_heads):
    """All meshes, with heads shared by neighbours or across nodes, that nodes cut into equal parts."""
    for route in _routes(ranks, heads, kv_heads):
        for rings, _ in factors(route.positions):
            mesh = route_for(route.heads, ranks, ring="double", overlap=True, outer=route.outer, rings=rings)
            steps = [shape.places * (1 if route.outer else route.heads) for shape in mesh.shapes]
            if not any(step % ranks.intra and ranks.intra % step for step in steps):
                yield mesh


@pytest.mark.parametrize(
    "ranks", [Ranks(8, 8), Ranks(8, 2), Ranks(12, 3), Ranks(16, 4), Ranks(16, 2), Ranks(6, 1)], ids=str
)
def test_meshes_send_the_bytes_of_the_formula_by_link(ranks):
    routes = {(shape, route) for shape in HEADS for route in _meshes(ranks, *shape)}
    assert any(route.rings > 1 and route.shapes[-1].rings > 1 for _, route in routes)
    for (shape, route), pass_ in ((each, pass_) for each in routes for pass_ in Pass):
        programs = schedule(route, pass_).programs
        for name, dtypes in DTYPES.items():
            shard = _shard(*shape, dtypes)
            counted = mean_bytes(programs, message_bytes(shard, route, pass_), ranks.intra)
            formula = of_mesh(Share.of(shard), pass_, route, ranks.intra)
            for link in (Link.INTRA, Link.INTER):
                assert formula[link] == pytest.approx(counted[link], rel=1e-12), (shape, route, pass_, name)


@pytest.mark.parametrize("ranks", [Ranks(8, 8), Ranks(12, 12)], ids=str)
def test_meshes_of_any_shape_send_the_bytes_of_the_formula(ranks):
    """All degrees, on one node: where nodes cut a mesh unequally, bytes of both links together count."""
    for shape, pass_ in ((shape, pass_) for shape in HEADS for pass_ in Pass):
        for degree in legal_degrees(ranks, *shape):
            for rings, _ in factors(ranks.size // degree):
                route = route_for(degree, ranks, ring="double", overlap=True, rings=rings)
                shard = _shard(*shape, DTYPES["bf16, sums in float32"])
                sizes = message_bytes(shard, route, pass_)
                counted = mean_bytes(schedule(route, pass_).programs, sizes, ranks.intra)
                assert of_mesh(Share.of(shard), pass_, route, ranks.intra) == pytest.approx(counted)


@pytest.mark.parametrize(("rings", "intra"), [(2, 4), (4, 5)])
def test_a_mesh_whose_rings_nodes_cut_unequally_has_no_formula_by_link(rings, intra):
    with pytest.raises(ValueError, match="no formula for"):
        of_mesh(Share.of(_shard(8, 8, DTYPES["float32"])), Pass.FORWARD, Route(1, 6, rings=rings), intra)


@pytest.mark.parametrize(("route", "intra"), [(Route(1, 8, direct=True), 4), (Route(1, 4, 3), 4)])
def test_what_has_no_closed_formula_is_refused(route, intra):
    with pytest.raises(ValueError, match="no formula for"):
        of_ring(Share.of(_shard(12, 12, DTYPES["float32"])), Pass.FORWARD, route, intra)


def _units(heads, kv_heads, output=1.0):
    """A share in units of N d / G numbers, without statistics, gradients twice as wide."""
    kv = 2 * kv_heads / heads
    return Share(heads=heads, kv_heads=kv_heads, q=1, out=1, kv=kv, statistic=0, output=output)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (64, 8), (32, 1)])
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_a_mesh_moves_what_the_formula_says(heads, kv_heads, degree):
    """(N d / G) [A + (1 + o / s)(a - 1) + 2 (b - 1) / r], and in backward A' + (2 + g / s)(a - 1) + ..."""
    share, others, wide = _units(heads, kv_heads, output=2.0), degree - 1, 2 if degree > kv_heads else 1
    r = heads / kv_heads * (1 if degree <= kv_heads else kv_heads / degree)
    for rows, columns in ((1, 1), (1, 8), (8, 1), (2, 4), (3, 5)):
        forward = (2 + 2 / r) * others / degree + (1 + 2) * (rows - 1) + 2 * (columns - 1) / r
        backward = (2 + wide * 2 / r) * others / degree + (2 + 2) * (rows - 1) + (2 + 4) * (columns - 1) / r
        of_mesh = {"heads": degree, "rows": rows, "columns": columns}
        assert through_nic(share, Pass.FORWARD, **of_mesh) == pytest.approx(forward)
        assert through_nic(share, Pass.KV, **of_mesh) == pytest.approx(backward)
        # alone, a mesh rounds the last hops of dQ, and of dK and dV
        rounded = (rows > 1) + (columns > 1) * (1 if degree <= kv_heads else 0) * 2 / r
        assert moved(share, Pass.FORWARD, **of_mesh) == pytest.approx(forward)
        assert moved(share, Pass.KV, **of_mesh) == pytest.approx(backward - rounded)


def test_the_members_of_the_family():
    share, size = _units(32, 32), 16
    assert moved(share, Pass.FORWARD, columns=size) == 2 * 15  # RingAttention
    assert moved(share, Pass.QUERY, rows=size) == 2 * 15 + 2 * 14 + 1  # the paper's rotation of queries
    assert moved(share, Pass.FORWARD, heads=size) == 4 * 15 / 16  # Ulysses


def _gains(heads, kv_heads, pass_, *, output=1.0, most=1):
    """How many times fewer bytes than the double ring the best mesh of nodes moves, on 8, 32, 128 nodes."""
    share = _units(heads, kv_heads, output)
    for nodes in (8, 32, 128):
        ring = through_nic(share, pass_, columns=nodes)
        if pass_ != Pass.FORWARD:
            ring = min(ring, through_nic(share, pass_, rows=nodes))
        degrees = [h for h in (1, 2, 4, 8, 16, 32) if h <= most and nodes % h == 0]
        yield ring / min(
            through_nic(share, pass_, heads=h, rows=a, columns=b)
            for h in degrees
            for a, b in factors(nodes // h)
        )


def test_fewer_bytes_than_the_double_ring():
    """Forward of MHA: a mesh of nodes, in float32 and in bfloat16; heads across nodes as well."""
    assert [*_gains(32, 32, Pass.FORWARD)] == pytest.approx([1.75, 3.10, 5.77], abs=0.005)
    assert [*_gains(32, 32, Pass.FORWARD, output=2.0)] == pytest.approx([1.56, 2.70, 4.98], abs=0.005)
    assert [*_gains(32, 32, Pass.FORWARD, most=32)] == pytest.approx([4, 16, 32.25], abs=0.005)
    assert [*_gains(32, 32, Pass.FORWARD, output=2.0, most=32)] == pytest.approx([4, 16, 28.62], abs=0.005)


def test_fewer_bytes_than_the_double_ring_in_backward():
    """Heads in groups of 8, gradients in float32: the exchange of heads sends dQ, dK and dV in bfloat16."""
    assert [*_gains(64, 8, Pass.KV, most=8)] == pytest.approx([2.67, 5.51, 8.49], abs=0.005)
    assert [*_gains(32, 4, Pass.KV, most=4)] == pytest.approx([2.15, 3.35, 5.62], abs=0.005)
    assert [*_gains(32, 32, Pass.KV, most=1)] == pytest.approx([1.56, 2.70, 4.98], abs=0.005)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (64, 8), (128, 1)])
@pytest.mark.parametrize("places", [2, 8, 32, 128, 1024])
def test_nothing_moves_less_than_the_bound(heads, kv_heads, places):
    share = _units(heads, kv_heads)
    of_bound, tried = least(share, places), 0
    for degree in (h for h in range(1, heads + 1) if heads % h == 0 and places % h == 0):
        if kv_heads % degree and degree % kv_heads:
            continue
        for rows, columns in factors(places // degree):
            tried += 1
            for pass_ in (Pass.FORWARD, Pass.KV):
                of_mesh = moved(share, pass_, heads=degree, rows=rows, columns=columns)
                assert of_mesh >= of_bound * (1 - 1e-12)
    assert tried


def test_heads_and_a_mesh_meet_the_bound():
    share = _units(32, 32)
    assert least(share, 32) == moved(share, Pass.FORWARD, heads=32)
    assert least(share, 128) == moved(share, Pass.FORWARD, heads=32, rows=2, columns=2)
    for size in (2**14, 2**20):  # 4 N d / sqrt(r h G), less the rows that are there
        assert least(share, size) == pytest.approx(4 * sqrt(size / 32) - 4 / 32)
        grouped = _units(32, 8)
        assert least(grouped, size) == pytest.approx(4 * sqrt(size / 32), rel=1e-2)
    assert least(replace(share, heads=1, kv_heads=1), 64) == moved(share, Pass.FORWARD, rows=8, columns=8)


HIDES = Rates(intra=400e9, inter=100e9, compute=400e12)
"""Links that are fast beside the kernel, at 16K tokens a rank."""


def _route(ranks, rates, **config):
    shard = Shard(
        batch=1, tokens=2**14, heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16
    )
    config = BurstConfig(ring="double", **config)
    n = 2**14 * ranks.size
    return decide(config, Question(shard, Layout("zigzag"), Mask.causal(), n, ranks, rates)).route


@pytest.mark.parametrize("ranks", [Ranks(8, 8), Ranks(16, 4), Ranks(32, 8)], ids=str)
def test_auto_leaves_heads_in_the_node_where_bytes_are_hidden(ranks):
    """The route, and with it the program and its CPU seconds, is the one without a placement to choose."""
    assert _route(ranks, HIDES) == Route(ranks.size // ranks.intra, ranks.intra)  # of itself, a ring
    for degree in (1, 2, 4, "auto"):
        inner = _route(ranks, HIDES, head_parallel=degree, head_placement="inner")
        assert not inner.outer and _route(ranks, HIDES, head_parallel=degree) == inner


@pytest.mark.parametrize("rates", [HIDES, replace(HIDES, intra=4e9)], ids=["fast links", "slow links"])
def test_one_node_has_no_outer_heads_by_itself(rates):
    for degree in ("auto", 2, 4):
        assert not _route(Ranks(8, 8), rates, head_parallel=degree).outer


def test_auto_takes_heads_across_nodes_where_links_between_them_are_slow():
    assert _route(Ranks(32, 8), replace(HIDES, inter=0.3e9), head_parallel="auto").outer
