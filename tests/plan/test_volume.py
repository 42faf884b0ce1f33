"""Closed formulas for bytes, held against programs by link and dtype."""

import pytest
import torch
from volume import Share, least, of_ring

from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import Route, route_for, schedule
from burst_plan.simulate.cost import mean_bytes, message_bytes

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
                block = route.ring_size if route.outer else degree
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


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (64, 8), (128, 1)])
@pytest.mark.parametrize("places", [2, 8, 32, 128, 1024])
def test_nothing_moves_less_than_the_bound(heads, kv_heads, places):
    share = _units(heads, kv_heads)
    for degree in legal_degrees(Ranks(places, places), heads, kv_heads):
        for pass_ in Pass:
            moved = sum(of_ring(share, pass_, Route(1, places // degree, degree), places).values())
            assert moved >= least(share, places) * (1 - 1e-12)


def _units(heads, kv_heads):
    """A share in units of N d / G numbers, without statistics, gradients twice as wide."""
    return Share(heads=heads, kv_heads=kv_heads, q=1, out=1, kv=2 * kv_heads / heads, statistic=0)


def _gains(heads, kv_heads, passes, most):
    """How many times fewer bytes than the double ring heads across nodes move, on 8, 32, 128 nodes."""
    share = _units(heads, kv_heads)
    for nodes in (8, 32, 128):
        ranks = Ranks(8 * nodes, 8)
        degrees = [h for h in (1, 2, 4, 8, 16, 32) if h <= most and nodes % h == 0]
        routes = [route_for(h, ranks, ring="double", overlap=True, outer=True) for h in degrees]
        ring, *others = (
            min(of_ring(share, pass_, route, 8)[Link.INTER] for pass_ in passes) for route in routes
        )
        yield ring / min(others)


def test_fewer_bytes_than_the_double_ring():
    """Of forward; and of backward with heads in groups of 8, gradients in float32."""
    assert [*_gains(32, 32, [Pass.FORWARD], 32)] == pytest.approx([4, 16, 25.72], abs=0.005)
    assert [*_gains(64, 8, [Pass.KV, Pass.QUERY], 8)] == pytest.approx([2.67, 5.51, 7.21], abs=0.005)
