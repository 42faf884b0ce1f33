"""The whole function over gloo processes: exactness, bytes, ways of calling."""

import itertools

import pytest
import torch
import torch.distributed as dist
from cells import crossed
from dense import ALTERNATING, assert_as_exact_as, dense, error, problem, share_score, single_kernel
from masks import MASKS, layouts
from ranks import on_ranks, processes
from sharded import whole_results

from burst_mcore import BurstConfig, Mask, Topology, burst_attention, shard
from burst_mcore.attention.kernels.table import KERNELS

GQA = {"mha": 4, "gqa": 2, "mqa": 1}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _grid(rank, size, dtype):
    kernel = KERNELS["aten-cpu"]
    cases = itertools.product(layouts(size), MASKS, ("query", "kv"), GQA)
    for i, (layout, kind, direction, kv) in enumerate(cases):
        n = 16 * layout.divisor(size)
        p = problem(size, n, batch=2, kv_heads=GQA[kv], head_dim=32, dtype=dtype)
        config = BurstConfig(layout=layout, backward=direction)
        got = whole_results(p, MASKS[kind], rank, size, config)
        assert got.out.dtype == got.dq.dtype == got.dk.dtype == got.dv.dtype == dtype
        assert got.lse.dtype == torch.float32
        if i % size != rank:  # all hold the same, and one of them looks at it
            continue
        bar = single_kernel(p, kernel, MASKS[kind])
        try:
            assert_as_exact_as(got, bar, dense(p, MASKS[kind]))
        except AssertionError as e:
            raise AssertionError(f"{layout} {kind} {direction} {kv} {dtype}: {e}") from e


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((1, dtype) for dtype in DTYPES),
        (2, torch.float16),
        *(pytest.param(size, dtype, marks=pytest.mark.slow) for size in (3, 4) for dtype in DTYPES[:2]),
    ],
    ids=str,
)
def test_as_exact_as_the_kernel_alone(size, dtype):
    processes(size, _grid, dtype)


def _odd_uses(rank, size, degree):
    """Strides, autocast, several calls in flight, a gradient for one input only, lse gradients, inference."""
    topology = Topology.from_group(dist.group.WORLD, intra_size=2 if size == 4 else size)
    p = problem(7, 8 * size, batch=2, kv_heads=2, dtype=torch.float32)
    want = dense(p, Mask.causal())

    def local(x):
        return shard(x, 1, rank=rank, size=size)

    def attend(*x, lse=False, **way):
        config = BurstConfig(head_parallel=degree, **way)
        return burst_attention(*x, topology=topology, mask=Mask.causal(), config=config, return_lse=lse)

    sequence_first = [local(x).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in p[:3]]
    every_other = [torch.stack([local(x)] * 2, -1)[..., 0].requires_grad_() for x in p[:3]]
    outs = [attend(*x, backward="query") for x in (sequence_first, every_other)]
    for out, x in zip(outs, (sequence_first, every_other), strict=True):  # first in, first out: 1F1B's order
        (out * local(p.dout)).sum().backward()
        for got, whole in zip(
            (out, *(t.grad for t in x)), (want.out, want.dq, want.dk, want.dv), strict=True
        ):
            assert error(got, local(whole)) < 2e-6
    q, k, v = (local(x) for x in p[:3])
    v.requires_grad_()
    attend(q, k, v).sum().backward()  # the gradient is an expanded scalar, without strides
    sums = dense(p._replace(dout=torch.ones_like(p.dout)), Mask.causal())
    assert error(v.grad, local(sums.dv)) < 2e-6
    halves = [x.detach().bfloat16() for x in (q, k, v)]
    want_cast = attend(*halves[:2], halves[2].requires_grad_())
    want_cast.sum().backward()
    v.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v)
        assert torch.equal(out, want_cast)
        out.sum().backward()
    assert torch.equal(v.grad, halves[2].grad.float())
    with torch.inference_mode():
        assert error(attend(q, k, v), local(want.out)) < 2e-6  # its buffers are never met again below
    q, k, v = (local(x).requires_grad_() for x in p[:3])
    out, lse = attend(q, k, v, kernel="reference", backward="query", lse=True)
    dlse = problem(8, 8 * size, batch=2, head_dim=1, dtype=torch.float32).q[..., 0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ((out * local(p.dout)).sum() + (lse * local(dlse)).sum()).backward()
    want = dense(p, Mask.causal(), dlse=dlse)
    for got, whole in zip((lse, q.grad, k.grad, v.grad), (want.lse, *want[2:]), strict=True):
        assert error(got, local(whole)) < 2e-6
    return True


@pytest.mark.parametrize(("size", "degree"), [(1, 1), (3, 1), (4, 1), (4, 2)])
def test_strides_autocast_calls_in_flight_and_lse_gradients(size, degree):
    assert all(processes(size, _odd_uses, degree))


@on_ranks(2)
def test_buffers_are_poisoned_in_the_processes_too(rank, size):
    assert torch.empty(4).isnan().all().item() and torch.empty_like(torch.ones(3)).isnan().all().item()


def _massive(rank, size, mask):
    p = share_score(problem(12, 88, batch=6, dtype=torch.float32), 0.0)
    ways = {"backward": "query"}, {"backward": "kv"}
    for score, kernel, way in itertools.product((30.0, 1000.0, ALTERNATING), ("aten-cpu", "reference"), ways):
        p = share_score(p, score)
        got = whole_results(p, mask, rank, size, BurstConfig(kernel=kernel, **way))
        assert_as_exact_as(got, single_kernel(p, KERNELS[kernel], mask), dense(p, mask))


@pytest.mark.parametrize(
    ("mask", "size"),
    crossed(
        (Mask.causal(), Mask.full()),
        (1, 2, 4),
        quick=lambda mask, size: (mask == Mask.full()) == (size == 2),
    ),
    ids=str,
)
def test_a_score_that_all_keys_share_costs_a_ring_nothing(mask, size):
    """Massive activations: D fits the weights of backward only if tiles were merged without rounding."""
    processes(size, _massive, mask)


def _narrow_gradients(rank, size):
    errors = {}
    for grad_dtype in (torch.float32, torch.bfloat16):
        p = problem(9, 64 * size, dtype=torch.bfloat16)
        config = BurstConfig(backward="query", grad_dtype=grad_dtype)
        got = whole_results(p, Mask.full(), rank, size, config)
        errors[grad_dtype] = error(got.dq, dense(p, Mask.full()).dq)
    return errors[torch.float32], errors[torch.bfloat16]


def test_float32_gradients_on_the_wire_are_more_exact_than_bfloat16():
    wide, narrow = processes(4, _narrow_gradients)[0]
    assert wide < narrow < 4 * wide
