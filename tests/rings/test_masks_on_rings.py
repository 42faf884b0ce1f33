"""The whole function over gloo processes, for random masks, layouts, lengths, topologies and shapes."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cells import crossed
from counting import count_bytes, count_pairs
from dense import Result, assert_as_exact_as, dense, problem, single_kernel
from masks import random_chunks, random_layout, random_mask, random_tree
from ranks import processes
from sharded import shape_of, whole_results

from burst_mcore import (
    BurstConfig,
    Layout,
    Mask,
    Topology,
    burst_attention,
    shard,
)
from burst_mcore.attention import function
from burst_mcore.attention.candidates import Ranks, legal_degrees
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.runtime import communicators
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


def _cost_of_largest_logits(rank, size):
    """(bytes sent, pairs met) of a forward, and with its largest logits, by kernel."""
    sent, pairs, found = count_bytes(), count_pairs(), []
    p = problem(0, 256, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32)
    q, k, v = (shard(x, 1, rank=rank, size=size, layout="zigzag") for x in p[:3])
    options = {"topology": Topology.from_group(dist.group.WORLD), "mask": Mask.causal()}
    for kernel, wanted in itertools.product(("aten-cpu", "reference"), (False, True)):
        sent.clear(), pairs.clear()
        burst_attention(q, k, v, **options, config=BurstConfig(kernel=kernel), return_max_logit=wanted)
        found.append((sum(sent), pairs["forward"]))
    return found


def test_largest_logits_send_nothing_more_and_kernels_that_have_them_meet_no_pair_twice():
    for (sent, pairs), twice, *of_reference in processes(2, _cost_of_largest_logits):
        assert sent > 0 and pairs > 0 and twice == (sent, 2 * pairs)
        assert of_reference == [(sent, pairs)] * 2


def _counted(rank, size):
    """(what, bytes sent, bytes of this rank's program) of forward and backward."""
    sent, made, agreed = count_bytes(), [], function.agree_on_call
    function.agree_on_call = lambda *args: made.append(agreed(*args)) or made[-1]
    topology, rows = Topology.from_group(dist.group.WORLD), []
    n, window = 1024, 24
    cu = [0, 100, 101, 480, 481, 500, n]
    masks = {
        "window": Mask.window(window, 0),
        "documents": Mask.causal() & Mask.documents(cu),
        "causal": Mask.causal(),
        "alone": Mask.documents(range(0, n + 1, n // (2 * size))),
    }
    for (name, mask), layout, direction in itertools.product(
        masks.items(), ("contiguous", "zigzag"), ("query", "kv")
    ):
        p = problem(0, n, heads=4, kv_heads=2, dtype=torch.float32)
        q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=layout) for x in p)
        q.requires_grad_()
        config = BurstConfig(layout=layout, backward=direction)
        sent.clear()
        out = burst_attention(q, k, v, topology=topology, mask=mask, config=config)
        forward = sum(sent)
        sent.clear()
        out.backward(dout)
        call, *_ = made[-1]
        shape = shape_of(p, n // size)
        planned = [
            link_bytes(
                program(rank, call.route, step, call.plan), rank, message_bytes(shape, call.route, step), size
            )["intra"]
            for step in ("forward", direction)
        ]
        rows.append((name, layout, direction, [forward, sum(sent)], planned))
    return rows


@pytest.mark.parametrize("size", [2, 4])
def test_the_wire_carries_what_the_plan_says_and_no_more_than_the_mask_needs(size):
    by_case = {}
    for rows in processes(size, _counted):
        for name, layout, direction, sent, planned in rows:
            assert sent == planned, (name, layout, direction)
            by_case.setdefault((name, layout, direction), []).append(sent[0])
    row = 2 * 2 * 16 * 4  # bytes of K and V of a token
    for (name, layout, _), forward in by_case.items():
        if name == "window":  # O(G W): a halo for each seam between chunks
            assert sum(forward) == row * 24 * (2 * size - 2 if layout == "zigzag" else size - 1)
        if name == "alone":  # every document within a chunk
            assert sum(forward) == 0
        if name == "causal":
            assert sum(forward) <= 0.76 * (size - 1) * 1024 * row or size == 2


def _sees_nothing(rank, size):
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


def test_queries_that_see_nothing_get_zeros_and_no_nan():
    processes(3, _sees_nothing)


def _dilated_over_many_runs(rank, size):
    """Tiles gather the rows of a residue over gaps that no rank reads, with shared heads too."""
    topology, n = Topology.from_group(dist.group.WORLD, intra_size=2), 240
    p = problem(3, n, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    masks = (
        Mask.causal() & Mask.dilated(n, 2),
        Mask.dilated(9, 4) & Mask.documents([0, 31, 100, 101, n]),
        Mask.dilated(n, 3) & Mask.ranges([(0, 60), (90, n)], [(20, 50), (60, 200)], ["causal", "full"]),
    )
    ways = {"ring": "double"}, {"ring": "direct"}, {"head_parallel": 2}
    for case, (mask, way) in enumerate(itertools.product(masks, ways)):
        layout = ("block-striped:12", "stacked-zigzag:10")[case % 2]
        config = BurstConfig(layout=layout, backward=("query", "kv")[case // 2 % 2], **way)
        degree = way.get("head_parallel", 1)
        assert plan_for(Layout.of(layout), mask, n, size // degree, degree).by_class
        got, want = whole_results(p, mask, rank, size, config, topology), dense(p, mask)
        for name in Result._fields:
            torch.testing.assert_close(getattr(got, name).double(), getattr(want, name), rtol=1e-9, atol=1e-9)


def test_dilated_masks_over_layouts_of_many_runs():
    processes(4, _dilated_over_many_runs)


def _with_communicators_of_its_own(rank, size):
    """As on NCCL each kind of message has a group of its own, collectively made; here of gloo."""
    made = []

    def group_of(self, link, members, max_ctas):
        made.append(link)
        return communicators.companion([self.ranks[r] for r in members], "gloo", self._timeout)

    communicators.Communicators._group = group_of
    topology = Topology.from_group(dist.group.WORLD, intra_size=2)
    mask, p = Mask.documents([0, 8, 32]), problem(0, 32, heads=2, kv_heads=2, dtype=torch.float64)
    for ring, direction, degree in itertools.product(("auto", "double", "direct"), ("query", "kv"), (1, 2)):
        config = BurstConfig(layout="contiguous", ring=ring, backward=direction, head_parallel=degree)
        got, want = whole_results(p, mask, rank, size, config, topology), dense(p, mask)
        assert all(torch.allclose(g, w) for g, w in zip(got, want, strict=True))
    return made


def test_ranks_without_messages_make_communicators_with_the_others():
    made = processes(4, _with_communicators_of_its_own)
    assert all(found == made[0] for found in made)
    assert len(made[0]) >= 4


def _single_keys(rank, size, dtype):
    """Of rows that see one key alone dS is 0: what dq and dk are instead, beside one device."""
    topology, n, found = Topology.from_group(dist.group.WORLD), 64, {}
    p = problem(5, n, heads=4, kv_heads=4, head_dim=64, dtype=dtype)
    at = [(i, i + 1) for i in range(n)]
    masks = {"own": Mask.documents(range(n + 1)), "remote": Mask.ranges(at, at[n // 2 :] + at[: n // 2])}
    for (where, mask), degree, backward in itertools.product(masks.items(), (1, 2), ("query", "kv")):
        config = BurstConfig(layout="contiguous", head_parallel=degree, backward=backward, ring="flat")
        got, alone = whole_results(p, mask, rank, size, config, topology), single_kernel(p, KERNEL, mask)
        # D in float32 is rounded once more than in the kernel of one device, which sums in its own order.
        largest = ((p.dout.float() * alone.out.float()).sum(-1).abs().max() / 64**0.5).item()
        for name, factor in (("dq", p.k), ("dk", p.q)):
            ours, theirs = (getattr(x, name).abs().max().item() for x in (got, alone))
            rounding = torch.finfo(torch.float32).eps * largest * factor.float().abs().max().item()
            found[f"{name}: {where}, head_parallel={degree}, {backward}"] = ours, theirs, rounding
    return found


@pytest.mark.parametrize(
    ("size", "dtype"),
    crossed(
        (2, 4),
        (torch.bfloat16, torch.float16, torch.float32),
        quick=lambda size, dtype: (size == 4) == (dtype == torch.bfloat16),
    ),
    ids=str,
)
def test_rows_that_see_a_single_key_have_gradients_as_small_as_on_one_device(size, dtype):
    for way, (ours, theirs, rounding) in processes(size, _single_keys, dtype)[0].items():
        assert rounding < 1e-5  # a rounding in 16 bits is a hundred times larger
        assert ours <= 2 * theirs + rounding, f"{way}: {ours:.2g} beside {theirs:.2g} and {rounding:.2g}"
