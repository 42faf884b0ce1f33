"""Multi-latent attention on every kind of route: the latent goes in the place of K and V."""

from dataclasses import replace

import pytest
import torch
from dense import Problem, dense
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms
from test_latent import DEEPSEEK, case, through
from test_simulation import hold_bytes, simulate
from typer.testing import CliRunner

from burst_mcore import Layout, Mask
from burst_mcore.attention.candidates import expansion_seconds
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.rates import Rates
from burst_plan.cli import app
from burst_plan.simulate.cost import home_expansion_seconds
from burst_plan.simulate.costing import pairs_of, work_of


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


@pytest.mark.parametrize("direction", [Pass.KV, Pass.QUERY])
def test_the_model_counts_every_expansion(direction):
    """Under a full mask: a latent that rotates once for each block, home's that stays once."""
    rates = Rates(intra=1e12, inter=1e12, compute=4e14)
    latent = replace(DEEPSEEK, tokens=1024, latent_rotates=True)
    route = Route(1, 12)
    pairs = pairs_of(Layout("zigzag"), Mask.full(), 1024 * 12, 12)
    for pass_ in (Pass.FORWARD, direction):
        of_latent, of_keys = (
            work_of(shard, pairs, route, pass_, rates).busiest
            for shard in (latent, replace(latent, latent_rotates=False))
        )
        at_home = home_expansion_seconds(latent, pass_, rates)
        one = 1024 * expansion_seconds(latent, pass_, rates)
        times = 1 if pass_ == Pass.QUERY else 12
        assert of_latent - of_keys + at_home == pytest.approx(times * one)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("--latent", "512+64", "--cluster", "h100:4x4"), 0, "auto:    ring='double', head_parallel="),
        (("--latent", "512"), 2, "a latent is its width + that of the rope key, such as 512+64, got '512'"),
        (
            ("--latent", "512+64", "--kv-heads", "4"),
            2,
            "K and V of all 8 heads, got kv_heads=4",
        ),
        (("--latent", "512+128"), 2, "a rope key is a part of a head of 128 numbers"),
        (("--value-dim", "0"), 2, "value_dim must be at least 1, got 0"),
    ],
)
def test_explain_takes_a_latent(words, status, told):
    done = CliRunner().invoke(app, ["explain", "--heads", "8", *words])
    assert done.exit_code == status and told in done.output
