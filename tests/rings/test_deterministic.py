"""Gradients that were asked to be deterministic are equal bit by bit, whatever comes first."""

import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dense import problem
from ranks import processes
from test_simulation import simulate

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention.kernels import triton as ours
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.route import Route
from burst_mcore.layout import shard

TOKENS = 256


def _gradients(rank, size, direction):
    """A rank's (dq, dk, dv) of three calls, in which other ranks are late."""
    late = random.Random(0)

    def slowed(function):
        def call(*args, **kwargs):
            time.sleep(late.choice((0, 0, 0.02)))
            return function(*args, **kwargs)

        return call

    for name, kernel in KERNELS.items():
        KERNELS[name] = replace(kernel, backward=slowed(kernel.backward))
    config = BurstConfig(layout="zigzag", backward=direction, deterministic=True)
    topology, found = Topology.from_group(dist.group.WORLD), []
    for run in range(3):
        late.seed(10 * run + rank)
        p = problem(0, TOKENS, kv_heads=2, dtype=torch.float32)
        q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout="zigzag") for x in p)
        wanted = [x.clone().requires_grad_() for x in (q, k, v)]
        out = burst_attention(*wanted, topology=topology, mask=Mask.causal(), config=config)
        out.backward(dout)
        found.append([x.grad for x in wanted])
    return found


@pytest.mark.parametrize("direction", ["kv", "query"])
def test_a_ring_gives_equal_bits_whichever_rank_is_late(direction):
    for first, *others in processes(4, _gradients, direction):
        for other in others:
            assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's, with small blocks; its atomic operations are counted, its programs may run last first."""
    if not ours.interpreted():
        pytest.skip("Triton compiles here: see tests/gpu")
    module = pytest.importorskip("triton.runtime.interpreter")
    builder = module.interpreter_builder
    place, atomic = builder.set_grid_idx, builder.create_atomic_rmw
    builder.last_first, builder.atomics = False, 0

    def placed(x, y, z):
        place(builder.grid_dim[0] - 1 - x if builder.last_first else x, y, z)

    def noted(*args):
        builder.atomics += 1
        return atomic(*args)

    monkeypatch.setattr(builder, "set_grid_idx", placed)
    monkeypatch.setattr(builder, "create_atomic_rmw", noted)
    monkeypatch.setattr(ours, "launch", lambda name, *given: ours.Launch(16, 16, 4, 1))
    yield builder
    del builder.last_first, builder.atomics


def _of_triton(builder, mask, deterministic, last_first):
    """(dq, dk, dv) of our Triton kernel on one rank, and how many atomic operations it took."""
    builder.last_first, builder.atomics = last_first, 0
    p = problem(1, 48, heads=2, kv_heads=1, dtype=torch.float32)
    options = {"dtype": torch.float32, "deterministic": deterministic}
    got, *_ = simulate(p, mask, "contiguous", Route(1, 1), "query", "triton", **options)
    return got[2:], builder.atomics


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.causal() & Mask.documents([0, 7, 48])], ids=str)
def test_triton_adds_in_one_order_only_where_that_is_asked(interpreter, mask):
    """Programs that run last first add to dq in another order, if several programs add to it."""
    first, atomics = _of_triton(interpreter, mask, True, False)
    turned, _ = _of_triton(interpreter, mask, True, True)
    assert atomics == 0
    for x, y in zip(first, turned, strict=True):
        assert torch.equal(x, y)
    in_order, atomics = _of_triton(interpreter, mask, False, False)
    turned, _ = _of_triton(interpreter, mask, False, True)
    assert atomics > 0
    assert not torch.equal(in_order[0], turned[0])
    torch.testing.assert_close(turned[0], first[0])
    for x, y in zip(in_order[1:], turned[1:], strict=True):
        assert torch.equal(x, y)  # dk and dv have one program each
