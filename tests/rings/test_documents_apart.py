"""NaN and infinity stay in their document, whatever tiles, rings and kernels make of it."""

import random

import pytest
import torch
import torch.distributed as dist
from dense import Problem, problem
from masks import random_layout
from ranks import processes
from sharded import whole

from burst_mcore import BurstConfig, Mask, Topology, burst_attention, shard
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.heads import legal_degrees

INPUTS = ("q", "k", "v", "dout")


def _attend(p, mask, config, topology, **options):
    """out, dq, dk, dv of the whole sequence; with return_lse lse has a gradient too."""
    rank, size = topology.rank, topology.size
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout) for x in p)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = burst_attention(*inputs, topology=topology, mask=mask, config=config, **options)
    if options.get("return_lse"):
        out, lse = out
        seen = lse.detach() > -torch.inf  # rows that see nothing have none
        (out * dout).sum().add(torch.where(seen, lse, 0).sum()).backward()
    else:
        out.backward(dout)
    return [whole(x, size, config.layout) for x in (out.detach(), *(x.grad for x in inputs))]


def _documents(draw, n):
    ends = sorted({0, n, *(draw.randint(1, n) for _ in range(draw.randint(1, 12)))})
    mask = Mask.documents(ends)
    kind = draw.choice(("full", "causal", "causal", "window"))
    if kind == "window":
        mask &= Mask.window(draw.randint(0, n), 0)
    return ends, mask & Mask.causal() if kind == "causal" else mask


def _poisoned(draw, p, first, last):
    """The problem with values of tokens first to last that are not finite, and where they are."""
    names = draw.sample(INPUTS, draw.randint(1, 3))
    value = draw.choice((torch.nan, torch.nan, torch.inf, -torch.inf))
    tensors = {name: x.clone() for name, x in p._asdict().items()}
    for name in names:
        rows = slice(first, last) if draw.random() < 0.5 else draw.randrange(first, last)
        tensors[name][:, rows] = value
    return Problem(**tensors), names, value


def _options(draw, kernel):
    """Other arguments of the call that the kernel supports, each now and then."""
    options = {
        "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]),
        "softcap": 5.0,
        "return_lse": True,
        "softmax_scale": 0.7,
    }
    legal = {name: value for name, value in options.items() if name != "softcap" or kernel == "reference"}
    return {name: value for name, value in legal.items() if draw.random() < 0.2}


def _stay(rank, size, intra, seeds):
    topology = Topology.single() if size == 1 else Topology.from_group(dist.group.WORLD, intra_size=intra)
    reached = 0
    for seed in seeds:
        draw = random.Random(seed)
        n = draw.choice((draw.randint(8, 64), draw.randint(64, 300)))
        ends, mask = _documents(draw, n)
        config = BurstConfig(
            layout=random_layout(draw, size, n),
            backward=draw.choice(("query", "kv")),
            ring=draw.choice(("double", "flat", "direct")),
            head_parallel=draw.choice(legal_degrees(Ranks(size, intra), 4, 2)),
            kernel=draw.choice(("aten-cpu", "aten-cpu", "reference")),
        )
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        options = _options(draw, config.kernel)
        p = problem(seed, n, batch=2, heads=4, kv_heads=2, head_dim=8, dtype=dtype)
        at = draw.randrange(len(ends) - 1)
        first, last = ends[at], ends[at + 1]
        spoilt, names, value = _poisoned(draw, p, first, last)
        words = (
            f"seed {seed}: n={n} {mask} {ends} {config} {[*options]}, {value} in {names} of {first} to {last}"
        )
        clean, got = (_attend(x, mask, config, topology, **options) for x in (p, spoilt))
        others = torch.ones(n, dtype=torch.bool)
        others[first:last] = False
        for x, want in zip(got, clean, strict=True):
            limit = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=4e-2, atol=2e-2)
            torch.testing.assert_close(x[:, others], want[:, others], **limit, msg=words)
        reached += any(not x[:, first:last].isfinite().all() for x in got)
        if value != value and {"q", "k", "v"} & set(names):
            assert not got[0][:, first:last].isfinite().all(), f"{words}: unnoticed"
    assert reached > len(seeds) / 2


@pytest.mark.parametrize(
    ("size", "intra", "first", "last"),
    [
        (1, 1, 0, 40),
        (2, 2, 0, 15),
        (4, 2, 0, 5),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((2, 2, 15, 40), (4, 2, 5, 40), (3, 1, 0, 40))
        ),
    ],
)
def test_what_is_not_finite_stays_in_its_document(size, intra, first, last):
    processes(size, _stay, intra, range(first, last))
