"""Multi-latent attention over a mesh: the latent goes along rows and columns in the place of K and V."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cells import crossed
from dense import Problem, dense
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms
from ranks import processes
from test_latent import DEEPSEEK, case, on_ring, through
from test_simulation import simulate
from typer.testing import CliRunner
from volume import Share, of_mesh

from burst_mcore import BurstConfig, Layout, Mask, Topology
from burst_mcore.attention.autotune.choose import best
from burst_mcore.attention.autotune.cost import (
    expansion_seconds,
    home_expansion_seconds,
    link_bytes,
    link_class,
    mean_bytes,
    message_bytes,
)
from burst_mcore.attention.autotune.costing import pairs_of, work_of
from burst_mcore.attention.autotune.decide import decide
from burst_mcore.attention.autotune.question import Question
from burst_mcore.attention.autotune.search import costed
from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route, program, schedule
from burst_mcore.attention.shard import Shard
from burst_mcore.rates import Rates
from burst_plan.cli import app


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


MESHES = [
    *(Route(1, places, rings=rings) for rings, places in [(2, 1), (2, 2), (4, 1), (3, 2), (2, 3), (4, 2)]),
    *(Route(2, 2, rings=2), Route(2, 1, 2, rings=2), Route(1, 2, 2, rings=2), Route(1, 2, 4, rings=2)),
    *(Route(1, 2, 4, rings=2, outer=True), Route(2, 2, overlap=False, rings=2)),
    *(Route(1, 2, 2, rings=2, overlap=False), Route(1, 3, 2, rings=3)),
]


@pytest.mark.parametrize(
    ("route", "direction"),
    crossed(
        MESHES,
        ("query", "kv"),
        quick=lambda route, direction: (MESHES.index(route) % 2 == 0) == (direction == "query"),
    ),
    ids=str,
)
def test_all_ranks_together_equal_dense_attention(route, direction):
    for mask in (Mask.causal(), Mask.full()):
        n = 2 * Layout("zigzag").divisor(route.size)
        _simulated(case(route.size, n, rank=12, nope=8, rope=4, value=8), mask, "zigzag", route, direction)


ANYTHING = given(
    draw=randoms,
    rings=st.integers(1, 4),
    nodes=st.integers(1, 2),
    intra=st.integers(1, 3),
    degree=st.sampled_from([1, 2, 3]),
    outer=st.booleans(),
    overlap=st.booleans(),
    n=st.integers(1, 120),
    direction=st.sampled_from(["query", "kv"]),
    batch=st.integers(1, 2),
    each=st.integers(1, 2),
    dims=st.sampled_from([(8, 8, 4, 8), (5, 4, 4, 12), (24, 16, 8, 8)]),
    kernel=st.sampled_from(["reference", "aten-cpu"]),
)


@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_any_mask_layout_and_mesh(examples):
    settings(max_examples=examples, deadline=None)(ANYTHING(_equals_dense_attention))()


def _equals_dense_attention(
    draw, rings, nodes, intra, degree, outer, overlap, n, direction, batch, each, dims, kernel
):
    """Results, and bytes by link: those of every rank's program, with the latent in the place of K and V."""
    route = Route(nodes, intra, degree, overlap, outer=outer and degree > 1, rings=rings)
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
        latent_travels=True,
    )
    plan = plan_of(layout, mask, n, route.placement)
    for pass_, of_ranks in zip(("forward", direction), sent, strict=True):
        sizes = message_bytes(costed, route, pass_, return_lse=True)
        for number, by_peer in enumerate(of_ranks):
            by_link = {"intra": 0, "inter": 0}
            for peer, size in by_peer.items():
                by_link[link_class(number, peer, intra)] += size
            assert by_link == link_bytes(program(number, route, pass_, plan), number, sizes, intra)


def _over_gloo(rank, size):
    """Every mesh and direction, tokens enough and too few for all ranks, in float64."""
    topology = Topology.from_group(dist.group.WORLD, intra_size=2)
    meshes = (((2, 2), 1), ((4, 1), 1), ((2, 1), 2), ((1, 2), 2))
    ways = [
        (BurstConfig(mesh=mesh, head_parallel=degree, backward=backward, overlap=overlap), "on")
        for (mesh, degree), backward, overlap in itertools.product(meshes, ("query", "kv"), (True, False))
    ]
    ways += [(BurstConfig(mesh=mesh), "auto") for mesh in ("2x2", "none")]
    lengths = itertools.cycle((3, 64, 40, 5, 96))
    for (config, travels), n in zip(ways, lengths, strict=False):
        c = case(n, n, heads=4, batch=2)
        for mask in (Mask.causal(), Mask.window(9, 3)):
            got = on_ring(c, mask, rank, size, config, topology, travels)
            want = through(c, lambda p, mask=mask: dense(p, mask))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)


def test_meshes_of_four_ranks_agree_in_float64():
    processes(4, _over_gloo)


RATES = Rates(intra=4e11, inter=1e9, compute=4e14)


def _chosen(shard, ranks):
    question = Question(shard, Layout("zigzag"), Mask.causal(), shard.tokens * ranks.size, ranks, RATES)
    return best(costed(BurstConfig(), question, meshes=True)).route


def test_a_mesh_is_found_for_a_latent_only_if_queries_are_as_few():
    """Queries and outputs of 128 heads are a hundred latents, so that a ring of the latent moves less."""
    ranks, latent = Ranks(16, 1), replace(DEEPSEEK, tokens=4096, latent_travels=True)
    assert _chosen(latent, ranks).rings == 1
    assert _chosen(replace(latent, latent_travels=False), ranks).rings > 1
    assert _chosen(replace(latent, heads=2, kv_heads=2), ranks).rings > 1


def test_auto_weighs_the_latent_on_meshes_against_k_and_v_there():
    ranks, n, config = Ranks(16, 4), 16 * DEEPSEEK.tokens, BurstConfig(mesh="4x4")
    for inter, gains in ((1e9, True), (4e11, False)):
        rates = Rates(intra=4e11, inter=inter, compute=4e14)
        question = Question(DEEPSEEK, Layout("zigzag"), Mask.causal(), n, ranks, rates)
        assert decide(config, question, "auto").latent_travels == gains


@pytest.mark.parametrize("direction", [Pass.KV, Pass.QUERY])
def test_the_model_counts_every_expansion(direction):
    """Under a full mask: what travels once, home's latent once, others' that stay for each bundle."""
    rows, columns = 3, 4
    rates = Rates(intra=1e12, inter=1e12, compute=4e14)
    latent = replace(DEEPSEEK, tokens=1024, latent_travels=True)
    route = Route(1, columns, rings=rows)
    pairs = pairs_of(Layout("zigzag"), Mask.full(), 1024 * 12, 12)
    for pass_ in (Pass.FORWARD, direction):
        of_latent, of_keys = (
            work_of(shard, pairs, route, pass_, rates).busiest_of(route.of(pass_).rings)
            for shard in (latent, replace(latent, latent_travels=False))
        )
        at_home = home_expansion_seconds(latent, pass_, rates)
        one = 1024 * expansion_seconds(latent, pass_, rates)
        times = rows * (columns - 1) + 1 if pass_ == Pass.QUERY else columns
        assert of_latent - of_keys + at_home == pytest.approx(times * one)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("degree", [1, 2])
def test_bytes_and_resident_memory_are_those_of_the_formulas(rows, columns, degree):
    """A latent counts R + Dr numbers a token, and as many of a gradient that goes home along a column."""
    shard = replace(DEEPSEEK, tokens=16, heads=8, kv_heads=8, latent_travels=True)
    route, rank = Route(1, columns, degree, rings=rows), 16 * (512 + 64)
    for pass_ in Pass:
        sizes = message_bytes(shard, route, pass_)
        sent = sum(mean_bytes(schedule(route, pass_).programs, sizes, route.size).values())
        formula = of_mesh(Share.of(shard), pass_, route, route.size)
        assert sum(formula.values()) == pytest.approx(sent, rel=1e-12)
    along = message_bytes(shard, route, Pass.QUERY).whole
    assert (along["resident"], along["share"]) == (2 * rank * degree, 4 * rank * degree)


def _explained(*words):
    done = CliRunner().invoke(app, ["explain", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_explain_takes_a_latent():
    """As the docs say: on 4 x 4 H100s heads over 4, on a mesh of 2 x 2."""
    deepseek = "--heads 128 --head-dim 192 --value-dim 128 --seq 128K --cluster h100:4x4 --mesh auto"
    told = _explained(*deepseek.split(), "--latent", "512+64")
    assert "(mesh of 2 x 2: each row a double ring of 2 x 1, heads over 4)" in told
    assert "mesh:    ring='double', head_parallel=4, mesh='2x2', backward=" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--latent", "512"), "a latent is its width + that of the rope key, such as 512+64, got '512'"),
        (("--latent", "512+64", "--kv-heads", "4"), "a latent makes K and V of all 8 heads, got kv_heads=4"),
        (("--latent", "512+128"), "a rope key is a part of a head of 128 numbers"),
        (("--value-dim", "0"), "value_dim must be at least 1, got 0"),
    ],
)
def test_explain_refuses_other_words(words, told):
    done = CliRunner().invoke(app, ["explain", "--heads", "8", *words])
    assert done.exit_code == 2 and told in done.output
