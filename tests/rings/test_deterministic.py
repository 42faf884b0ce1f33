"""Gradients of Triton that were asked to be deterministic are equal bit by bit, whatever comes first."""

import pytest
import torch
from dense import problem
from test_simulation import simulate

from burst_mcore import Mask
from burst_mcore.attention.kernels import triton as ours
from burst_mcore.attention.schedule.route import Route


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
