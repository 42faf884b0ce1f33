"""Multi-latent attention: the latent on the wire gives what K and V on the wire give, in fewer bytes."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from counting import count_pairs
from dense import Problem, dense, error, single_kernel
from masks import random_layout, random_mask
from ranks import on_ranks, processes
from sharded import whole
from torch import Tensor

from burst_mcore import BurstConfig, Latent, Layout, Mask, Topology, burst_attention, shard
from burst_mcore.attention.choose import Question, decide
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import Route
from burst_mcore.checkpointing import Segment, checkpoint
from burst_mcore.rates import Rates
from burst_plan.machines import machine
from burst_plan.simulate.cost import message_bytes
from burst_plan.simulate.search import fastest

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL = KERNELS["aten-cpu"]


class Case(NamedTuple):
    """Global tensors, the same on every rank."""

    q: Tensor
    compressed: Tensor
    rope_key: Tensor
    weight: Tensor
    dout: Tensor

    def to(self, dtype):
        return Case(*(x.to(dtype) for x in self))


class Gradients(NamedTuple):
    out: Tensor
    dq: Tensor
    dcompressed: Tensor
    drope_key: Tensor
    dweight: Tensor


def case(seed, n, *, batch=1, heads=4, rank=24, nope=16, rope=8, value=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = draw(heads, rank, nope + value) / rank**0.5
    drawn = draw(batch, n, heads, nope + rope), draw(batch, n, rank), draw(batch, n, 1, rope), weight
    return Case(*drawn, draw(batch, n, heads, value)).to(dtype)


def expanded(c: Case) -> tuple[Tensor, Tensor]:
    """K and V by definition."""
    nope = c.q.shape[3] - c.rope_key.shape[3]
    up = torch.einsum("bsr,hre->bshe", c.compressed, c.weight)
    keys = [up[..., :nope], c.rope_key.expand(-1, -1, c.q.shape[2], -1)]
    return torch.cat(keys, 3), up[..., nope:].contiguous()


def through(c: Case, attend) -> Gradients:
    """The gradients of attention to expanded K and V, these by torch.autograd; attend: of a `Problem`."""
    compressed, rope_key, weight = (x.detach().requires_grad_() for x in c[1:4])
    k, v = expanded(c._replace(compressed=compressed, rope_key=rope_key, weight=weight))
    result = attend(Problem(c.q, k.detach(), v.detach(), c.dout))
    torch.autograd.backward((k, v), (result.dk.to(k.dtype), result.dv.to(v.dtype)))
    return Gradients(result.out, result.dq, compressed.grad, rope_key.grad, weight.grad)


def on_ring(c: Case, mask, rank, size, config, topology, rotates, around=lambda f, *args: f(*args)):
    """The same of a ring, on every rank; around: calls the function of the rank's tensors."""
    q, compressed, rope_key, dout = (
        shard(x, 1, rank=rank, size=size, layout=config.layout)
        for x in (c.q, c.compressed, c.rope_key, c.dout)
    )
    leaves = [x.detach().clone().requires_grad_() for x in (q, compressed, rope_key, c.weight)]

    def attend(q, compressed, rope_key, weight):
        latent = Latent(compressed, rope_key, weight, rotates)
        return burst_attention(q, latent=latent, topology=topology, mask=mask, config=config)

    out = around(attend, *leaves)
    assert out.shape == dout.shape
    out.backward(dout)
    parts = out.detach(), *(leaf.grad for leaf in leaves[:3])
    dweight = leaves[3].grad.double()
    dist.all_reduce(dweight)  # as the framework sums gradients of weights
    return Gradients(*(whole(x, size, config.layout) for x in parts), dweight)


def _random(draw, ranks, dtype):
    heads = draw.choice((1, 2, 4, 6))
    n = draw.choice((draw.randint(8, 40), draw.randint(100, 300), 48 * draw.randint(2, 6)))
    config = BurstConfig(
        layout=random_layout(draw, ranks.size, n),
        backward=draw.choice(("auto", "query", "kv")),
        ring=draw.choice(("auto", "double", "flat", "direct")),
        overlap=draw.random() < 0.75,
        head_parallel=draw.choice((1, 1, "auto", *legal_degrees(ranks, heads, heads))),
        head_placement=draw.choice(("auto", "inner", "outer")),
    )
    widths = {"rank": draw.choice((8, 24)), "nope": draw.choice((8, 16)), "rope": draw.choice((8, 16))}
    c = case(n, n, batch=draw.randint(1, 2), heads=heads, value=draw.choice((8, 24)), **widths)
    return c.to(dtype), random_mask(draw, n), config, draw.choice(("on", "on", "off", "auto"))


def _as_exact(got, bar, want):
    """Each error at most twice that of one kernel on expanded K and V, or of half an ulp."""
    for name, g, b, w in zip(Gradients._fields, got, bar, want, strict=True):
        eps = torch.finfo(b.dtype).eps
        if w.norm() < 1e-10:  # nothing to be relative to
            allowed = 2 * max(b.double().norm(), eps * g.numel() ** 0.5)
            assert g.double().norm() <= allowed, f"{name} is {g.norm()}, not 0"
            continue
        allowed = 2 * max(error(b, w), eps / 2)
        assert error(g, w) <= allowed, f"{name}: {error(g, w):.3e} > {allowed:.3e}"


def _samples(rank, size, intra, seeds):
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    for seed in seeds:
        draw = random.Random(seed)
        c, mask, config, rotates = _random(draw, Ranks(size, intra), draw.choice(DTYPES))
        words = f"seed {seed}: {mask} {config} {[list(x.shape) for x in c]} {c.q.dtype} {rotates}"
        try:
            got = on_ring(c, mask, rank, size, config, topology, rotates)
            if seed % size == rank:
                bar = through(c, lambda p, mask=mask: single_kernel(p, KERNEL, mask))
                _as_exact(got, bar, through(c.to(torch.float64), lambda p, mask=mask: dense(p, mask)))
        except Exception as error_:
            raise AssertionError(f"{words}: {error_}") from error_


@pytest.mark.parametrize(
    ("size", "intra", "first", "last"),
    [
        (4, 2, 0, 10),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in ((2, 2, 0, 25), (4, 2, 10, 25))),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in ((3, 1, 0, 25), (6, 3, 0, 25))),
    ],
)
def test_random_masks_layouts_and_shapes(size, intra, first, last):
    processes(size, _samples, intra, range(first, last))


def _by_a_kernel_that_adds_in_place(rank, size, ways):
    topology = Topology.from_group(dist.group.WORLD)
    masks = itertools.cycle((Mask.causal(), Mask.window(9, 3), Mask.causal() & Mask.dilated(20, 3)))
    for (deterministic, backward, degree), mask in zip(ways, masks, strict=False):
        options = {"kernel": "triton", "deterministic": deterministic, "head_parallel": degree}
        config = BurstConfig(backward=backward, ring="flat", **options)
        c = case(5, 32, heads=2, dtype=torch.float32)
        got = on_ring(c, mask, rank, size, config, topology, "on")
        want = through(c.to(torch.float64), lambda p, mask=mask: dense(p, mask))
        for name, g, w in zip(Gradients._fields, got, want, strict=True):
            assert error(g, w) < 3e-6, (name, config, mask)


@pytest.mark.parametrize(
    "ways",
    [
        ((False, "kv", 1), (True, "kv", 1)),
        pytest.param(
            tuple(itertools.product((False, True), ("query", "kv"), (1, 2))), marks=pytest.mark.slow
        ),
    ],
    ids=["some ways", "all ways"],
)
def test_kernels_that_add_in_place_take_it(ways):
    pytest.importorskip("triton")
    processes(2, _by_a_kernel_that_adds_in_place, ways)


@on_ranks(4)
def test_checkpointed_layers_keep_segments_of_it(rank, size):
    """Results, outputs of the recomputation, and the pairs that it meets: those of the front alone."""
    topology, n = Topology.from_group(dist.group.WORLD, intra_size=2), 96
    mask, attended = Mask.causal(), count_pairs()
    ways = itertools.product(("on", "off"), (1, 2), (0.0, 0.5, 1.0))
    for (rotates, degree, keep), reentrant in zip(ways, itertools.cycle((True, False)), strict=False):
        c, outs = case(3, n, heads=4), []
        config = BurstConfig(layout="striped", head_parallel=degree)

        def around(attend, *leaves, keep=keep, reentrant=reentrant, outs=outs):
            def layer(*args):
                outs.append(attend(*(x * 1 for x in args)))
                return outs[-1] * torch.ones(())  # saved for backward: torch recomputes up to the last saved

            return checkpoint(layer, *leaves, policy=Segment(keep), use_reentrant=reentrant)

        attended.clear()
        got = on_ring(c, mask, rank, size, config, topology, rotates, around)
        for g, w in zip(got, through(c, lambda p: dense(p, mask)), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)
        forward, again = outs
        torch.testing.assert_close(again, forward, rtol=1e-12, atol=1e-12)
        met, front = torch.tensor([attended["forward"], attended["backward"]]), round(n * (1 - keep))
        dist.all_reduce(met)  # each share of the heads is attended on other ranks
        assert met.tolist() == [degree * m * (m + 1) // 2 for m in (n, front)], (config, rotates, keep)


def test_one_rank_saves_the_latent_and_not_k_and_v():
    c, saved = case(2, 64, heads=4, dtype=torch.float32), []
    leaves = [x.requires_grad_() for x in c[:4]]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        burst_attention(leaves[0], latent=Latent(*leaves[1:]), topology=Topology.single(), mask=Mask.causal())
    shapes = [tuple(x.shape) for x in saved]
    assert (1, 64, 1, 24) in shapes and (1, 64, 4, 16) in shapes  # the latent; and O
    assert sum(shape == (1, 64, 4, 24) for shape in shapes) == 1  # q, but no k


DEEPSEEK = Shard(
    batch=1,
    tokens=8192,
    heads=128,
    kv_heads=128,
    head_dim=192,
    value_dim=128,
    dtype=torch.bfloat16,
    latent=(512, 64),
)


ONE = Ranks(1, 1)


def test_deepseek_carries_576_numbers_a_token_instead_of_40960():
    rotating = replace(DEEPSEEK, latent_rotates=True)
    route = Route(1, 4)
    for pass_, kind in (("forward", "data"), ("kv", "data"), ("kv", "gradient")):
        bytes_ = 4 if kind == "gradient" else 2
        assert message_bytes(rotating, route, pass_).whole[kind] == 8192 * 576 * bytes_
        assert message_bytes(DEEPSEEK, route, pass_).whole[kind] == 8192 * 40960 * bytes_


def test_auto_takes_the_latent_only_where_a_gain_is_predicted():
    fast, slow = (Rates(intra=4e11, inter=inter, compute=4e14) for inter in (4e11, 5e9))
    for rates, ranks, gains in ((slow, Ranks(16, 4), True), (fast, Ranks(16, 4), False), (slow, ONE, False)):
        question = Question(DEEPSEEK, Layout("zigzag"), Mask.causal(), 8192 * ranks.size, ranks, rates)
        for rotates, want in (("auto", gains), ("on", True), ("off", False)):
            assert decide(BurstConfig(), question, rotates).latent_rotates == want


def test_predictions_in_the_docs_are_those_of_the_model():
    page = (Path(__file__).parents[2] / "docs" / "features" / "latent.md").read_text()
    rows = page.split("| K and V are sent | the latent is sent |\n")[1].splitlines()[1:7]
    assert len(rows) == 6
    for row in rows:
        name, nodes, degree, *said = (cell.strip() for cell in row.strip("|").split("|"))
        config = BurstConfig(ring="double", head_parallel=int(degree), head_placement="inner")
        ranks = Ranks(int(nodes) * 8, 8)
        call = Layout("zigzag"), Mask.causal(), 8192 * ranks.size, ranks, machine(name).rates
        found = [
            fastest(config, Question(replace(DEEPSEEK, latent_rotates=rotates), *call))
            for rotates in (False, True)
        ]
        assert said == [f"{way.seconds * 1e3:.0f} ms" for way in found]
