"""Documents in one launch: packed sequences, from the plan to a kernel, and the choice of kernels."""

import random
from dataclasses import replace

import pytest
import released
import torch
from dense import dense, error, problem
from masks import random_layout
from test_simulation import simulate

from burst_mcore import Layout, Mask, packages
from burst_mcore.attention.geometry.pattern import Abilities
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import LARGE, launches_of, tiles_of
from burst_mcore.attention.kernels.table import KERNELS, by_rank
from burst_mcore.attention.schedule.route import Route

ABILITIES = Abilities(windows=True, packed=True)


@pytest.fixture
def packing(monkeypatch):
    """A kernel that takes packed sequences, on the CPU: flash-attn's, by the reference."""
    released.install(monkeypatch, "flash2", "2.8", "flash-attn", "2.8.3")
    kernel = replace(KERNELS["flash2"], name="packing", supports=lambda ask: None)
    monkeypatch.setitem(KERNELS, "packing", kernel)
    yield
    packages.loaded.cache_clear()


def _documents(draw, n):
    ends = sorted({0, n, *(draw.randrange(1, n) for _ in range(draw.randrange(1, 12)))})
    mask = Mask.documents(torch.tensor(ends))
    return mask & draw.choice([Mask.causal(), Mask.full(), Mask.window(draw.randrange(1, 20), 0)])


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("seed", range(12))
def test_documents_on_a_ring_equal_dense_attention(seed):
    draw = random.Random(seed)
    size = draw.choice([1, 2, 3, 4])
    n = 24 * size
    mask, layout = _documents(draw, n), random_layout(draw, size, n)
    route = draw.choice([Route(1, size), Route(1, size, direct=True)])
    p = problem(seed, n, batch=draw.choice([1, 2]), kv_heads=2, dtype=torch.float64)
    direction = draw.choice(["query", "kv"])
    got, *_ = simulate(p, mask, layout, route, direction, "packing", dtype=torch.float64)
    for name, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, dense(p, mask), strict=True):
        assert error(g, w) < 1e-12, name


def _calls(mask, layout, n, size, abilities=ABILITIES):
    plan = plan_of(Layout.of(layout), mask, n, Placement(size))
    return [tiles_of(plan, q_at, k_at, abilities) for q_at in range(size) for k_at in range(size)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_all_documents_of_a_rank_are_one_or_two_launches(layout):
    n, size = 2**17, 4
    mask = Mask.causal() & Mask.documents(torch.arange(0, n + 1, 1024))
    for met in _calls(mask, layout, n, size):
        assert len(met) <= 2
        assert all(tile.pattern.packed for tile in met if len(tile.q[0]) > 4096)
    one_by_one = sum(map(len, _calls(mask, layout, n, size, Abilities(windows=True))))
    assert one_by_one > 15 * sum(map(len, _calls(mask, layout, n, size)))


SCATTERED = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(0)).tril() > 0.9
HOPPER = ("flash3", "flash4", "cudnn", "flash2", "aten-flash", "triton")


RANKED = {
    "causal": (Mask.causal(), "flash3", "triton"),
    "documents of 32K": (Mask.causal() & Mask.documents(range(0, 2**17 + 1, 2**15)), "flash3", "triton"),
    "of 1K": (Mask.causal() & Mask.documents(range(0, 2**17 + 1, 1024)), "flash3", "cudnn"),
    "of 64": (Mask.causal() & Mask.documents(range(0, 2**17 + 1, 64)), "flash3", "cudnn"),
    "window": (Mask.window(512, 0), "flash3", "cudnn"),
    "wide window": (Mask.window(2**16, 0), "flash3", "triton"),
    "dilated": (Mask.causal() & Mask.dilated(2**14, 64), "triton", "cudnn"),
    "one block a row": (Mask.blocks(torch.eye(1024, dtype=torch.bool).roll(5, 0), 128), "flash3", "cudnn"),
    "many blocks a row": (Mask.blocks(SCATTERED, 128), "triton", "cudnn"),
    "large blocks": (Mask.blocks(torch.eye(8, dtype=torch.bool), 2**14), "flash3", "triton"),
}
"""Masks of 128K tokens, and the first and one of the last kernels for them."""


@pytest.mark.parametrize("kind", RANKED)
def test_kernels_are_ranked_by_launches_and_tile_shapes(kind, monkeypatch):
    monkeypatch.setattr(packages, "capability", lambda: (9, 0))
    mask, first, last = RANKED[kind]
    ranked = by_rank("cuda", launches_of(mask, 2**17))
    assert ranked[0] == first and last in ranked[-3:-1] and set(ranked[:-1]) == set(HOPPER)
    assert by_rank("cuda", LARGE)[:-1] == list(HOPPER)
