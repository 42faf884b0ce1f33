"""The whole function over gloo processes, for random masks, layouts, lengths, topologies and shapes."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from counting import count_bytes
from dense import Result, assert_as_exact_as, dense, problem, single_kernel
from masks import random_chunks, random_layout, random_mask, random_tree
from ranks import on_ranks, processes
from sharded import shape_of, whole_results

from burst_mcore import (
    BurstConfig,
    Mask,
    Topology,
    burst_attention,
    shard,
)
from burst_mcore.attention import function
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import program
from burst_plan.simulate.cost import link_bytes, message_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL = KERNELS["aten-cpu"]


def random_call(draw, ranks, dtype):
    """(problem, mask, config) of any layout, mask, route and shape."""
    kv_heads, group = draw.randint(1, 3), draw.choice((1, 2, 4))
    heads = kv_heads * group
    n = draw.choice((draw.randint(1, 40), draw.randint(100, 300), 48 * draw.randint(2, 6)))
    degree = draw.choice((1, 1, "auto", *legal_degrees(ranks, heads, kv_heads)))
    config = BurstConfig(
        layout=random_layout(draw, ranks.size, n),
        backward=draw.choice(("auto", "query", "kv")),
        ring=draw.choice(("auto", "double", "flat", "direct")),
        overlap=draw.random() < 0.75,
        head_parallel=degree,
        head_placement=draw.choice(("auto", "inner", "outer")),
    )
    p = problem(
        n,
        n,
        batch=draw.randint(1, 2),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice((8, 32, 40)),
        dtype=dtype,
    )
    return p, random_mask(draw, n), config


SELDOM = {
    0: ("stacked-zigzag:2", random_tree),
    1: ("stacked-zigzag:3", lambda draw, n: random_tree(draw, n) | random_chunks(draw, n)),
    2: (None, lambda draw, n: random_chunks(draw, n) & Mask.causal()),
    3: (None, random_chunks),
}
"""By seed, layouts (None: any) and masks that random draws seldom bring. Every size of a ring gets these."""


def _samples(rank, size, intra, seeds):
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    for seed in seeds:
        draw = random.Random(seed)
        p, mask, config = random_call(draw, Ranks(size, intra), draw.choice(DTYPES))
        if seed in SELDOM:
            layout, mask_of = SELDOM[seed]
            mask, config = mask_of(draw, p.q.shape[1]), replace(config, layout=layout or config.layout)
        words = f"seed {seed}: n={p.q.shape[1]} {mask} {config} {tuple(p.k.shape)} {p.q.dtype}"
        try:
            got = whole_results(p, mask, rank, size, config, topology)
            if seed % size == rank:  # all hold the same, and one of them looks at it
                assert_as_exact_as(got, single_kernel(p, KERNEL, mask), dense(p, mask))
        except Exception as error:
            raise AssertionError(f"{words}: {error}") from error


@pytest.mark.parametrize(
    ("size", "intra", "first", "last"),
    [
        *((2, 2, 0, 28), (3, 1, 0, 10), (4, 2, 0, 14)),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((3, 1, 10, 28), (4, 2, 14, 28), (6, 3, 0, 28), (5, 5, 0, 28), (8, 4, 0, 28))
        ),
    ],
)
def test_random_masks_layouts_and_shapes(size, intra, first, last):
    processes(size, _samples, intra, range(first, last))


def _largest(p, mask, scale):
    """The max logit of each head, by definition, and the largest number among all scores."""
    q, k = p.q.double(), p.k.double().repeat_interleave(p.q.shape[2] // p.k.shape[2], 2)
    scores, at = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale, torch.arange(k.shape[1])
    largest = scores.masked_fill(~mask.allows(at, at), -torch.inf).amax((0, 2, 3))
    return largest, float(torch.linalg.vector_norm(scores, torch.inf))


def _max_logits(rank, size, intra, seeds):
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    for seed in seeds:
        draw = random.Random(seed)
        p, mask, config = random_call(draw, Ranks(size, intra), draw.choice((*DTYPES, torch.float64)))
        config = replace(config, kernel=draw.choice(("auto", "reference")))
        options = {"softmax_scale": draw.choice((None, 2.5)), "return_lse": True}
        options["softcap"] = 1.5 if config.kernel == "reference" and draw.random() < 0.5 else None
        q, k, v = (shard(x, 1, rank=rank, size=size, layout=config.layout) for x in p[:3])
        call = partial(burst_attention, q, k.requires_grad_(), v, topology=topology, mask=mask, config=config)
        out, lse, got = call(**options, return_max_logit=True)
        assert all(map(torch.equal, (out, lse), call(**options))) and out.requires_grad
        assert got.dtype == lse.dtype and not got.requires_grad
        dist.all_reduce(got, dist.ReduceOp.MAX)
        want, most = _largest(p, mask, p.q.shape[3] ** -0.5 if options["softmax_scale"] is None else 2.5)
        of_one, steep = (1e-10, 2**40) if p.q.dtype == torch.float64 else (1e-6, 2**14)
        assert torch.isfinite(got).all() == torch.isfinite(want).all()
        torch.testing.assert_close(
            got.double(), want, rtol=of_one, atol=of_one * most + math.log(p.q.shape[1]) / steep
        )


@pytest.mark.parametrize(("size", "intra"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_largest_logits_of_random_masks_layouts_and_shapes(size, intra):
    processes(size, _max_logits, intra, range(8))


@on_ranks(4)
def test_the_wire_carries_what_the_plan_says_and_no_more_than_the_mask_needs(rank, size):
    """A window needs a halo for each seam between chunks, and documents within chunks need nothing."""
    topology, n, sent = Topology.from_group(dist.group.WORLD), 1024, count_bytes()
    made, agreed = [], function.agree_on_call
    row = 2 * 2 * 16 * 4  # bytes of K and V of a token
    masks = {
        Mask.window(24, 0): lambda layout: row * 24 * (2 * size - 2 if layout == "zigzag" else size - 1),
        Mask.documents(range(0, n + 1, n // (2 * size))): lambda layout: 0,
        Mask.causal() & Mask.documents([0, 100, 101, 480, 481, 500, n]): None,
    }
    function.agree_on_call = lambda *args: made.append(agreed(*args)) or made[-1]
    for mask, layout, way in itertools.product(masks, ("contiguous", "zigzag"), ("query", "kv")):
        p = problem(0, n, heads=4, kv_heads=2, dtype=torch.float32)
        q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=layout) for x in p)
        config = BurstConfig(layout=layout, backward=way)
        sent.clear()
        out = burst_attention(q.requires_grad_(), k, v, topology=topology, mask=mask, config=config)
        forward = sum(sent)
        out.backward(dout)
        call, *_ = made[-1]
        for step, found in (("forward", forward), (way, sum(sent) - forward)):
            sizes = message_bytes(shape_of(p, n // size), call.route, step)
            assert found == link_bytes(program(rank, call.route, step, call.plan), rank, sizes, size)["intra"]
        total = torch.tensor(forward)
        dist.all_reduce(total)
        assert masks[mask] is None or total == masks[mask](layout)


@on_ranks(3)
def test_queries_that_see_nothing_get_zeros_and_no_nan(rank, size):
    """Rows that see nothing, ranks whose rows all see nothing, and a mask that allows nothing at all."""
    topology = Topology.from_group(dist.group.WORLD)
    for mask in (
        Mask.ranges([(10, 20)], [(0, 30)]),
        Mask.ranges([(0, 4)], [(60, 64)]),
        Mask.ranges([(0, 0)], [(0, 0)]),
        Mask.blocks(torch.zeros(4, 4), 16),
        Mask.window(3, None) & Mask.window(None, 0) & Mask.ranges([(0, 64)], [(0, 2)]),
    ):
        for direction, ring in itertools.product(("query", "kv"), ("auto", "double", "direct")):
            p = problem(1, 64, heads=2, kv_heads=1, head_dim=8, dtype=torch.float32)
            config = BurstConfig(backward=direction, ring=ring)
            got, want = whole_results(p, mask, rank, size, config, topology), dense(p, mask)
            for name in Result._fields:
                torch.testing.assert_close(
                    getattr(got, name).double(), getattr(want, name), rtol=1e-4, atol=1e-5
                )
