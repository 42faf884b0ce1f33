"""Multi-latent attention on every kind of route: the latent goes in the place of K and V."""

from dataclasses import replace

import pytest
import torch
from dense import Problem, dense
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms
from test_latent import case, through
from test_simulation import hold_bytes, simulate

from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.route import Route


def _simulated(c, mask, layout, route, direction, kernel="reference"):
    """The differences of all ranks together from dense attention to K and V, and the bytes that they sent."""
    p = Problem(c.q, c.compressed.unsqueeze(2), c.rope_key, c.dout)
    (out, _, dq, dlatent, drope, dweight), *sent = simulate(
        p, mask, layout, route, direction, kernel, up=c.weight
    )
    want = through(c, lambda p: dense(p, mask))
    for g, w in zip((out, dq, dlatent.squeeze(2), drope, dweight), want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)
    return sent


ANYTHING = given(
    draw=randoms,
    nodes=st.integers(1, 3),
    intra=st.integers(1, 4),
    degree=st.sampled_from([1, 2, 3]),
    kind=st.sampled_from(["", "", "outer", "mirrored", "direct"]),
    overlap=st.booleans(),
    n=st.integers(1, 120),
    direction=st.sampled_from(["query", "kv"]),
    batch=st.integers(1, 2),
    each=st.integers(1, 2),
    dims=st.sampled_from([(8, 8, 4, 8), (5, 4, 4, 12), (24, 16, 8, 8)]),
    kernel=st.sampled_from(["reference", "aten-cpu"]),
)


@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_any_mask_layout_and_route(examples):
    settings(max_examples=examples, deadline=None)(ANYTHING(_equals_dense_attention))()


def _equals_dense_attention(
    draw, nodes, intra, degree, kind, overlap, n, direction, batch, each, dims, kernel
):
    """Results, and bytes by link: those of every rank's program, with the latent in the place of K and V."""
    route = Route(nodes if kind != "direct" else 1, intra, degree, overlap)
    if kind and (kind != "outer" or degree > 1):
        route = replace(route, **{kind: True})
    assume(1 < route.size <= 16)
    heads, (rank, nope, rope, value) = degree * each, dims
    if kernel == "aten-cpu":
        value = nope + rope
    c = case(n, n, batch=batch, heads=heads, rank=rank, nope=nope, rope=rope, value=value)
    layout, mask = random_layout(draw, route.size, n), random_mask(draw, n)
    sent = _simulated(c, mask, layout, route, direction, kernel)
    costed = Shard(
        batch=batch,
        tokens=layout.padded(n, route.size) // route.size,
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope,
        value_dim=value,
        dtype=torch.float64,
        grad_dtype=torch.float64,
        latent=(rank, rope),
        latent_rotates=True,
    )
    plan = plan_of(layout, mask, n, route.placement)
    hold_bytes(sent, costed, route, direction, plan, intra)
