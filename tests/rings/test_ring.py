"""The whole function over gloo processes: exactness, bytes, desync, bad input."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from cells import crossed
from dense import ALTERNATING, Result, assert_as_exact_as, dense, error, problem, share_score, single_kernel
from masks import MASKS, layouts
from ranks import processes

from burst_mcore import BurstConfig, Mask, Topology, burst_attention, shard, unshard
from burst_mcore.attention import function
from burst_mcore.attention.kernels.table import KERNELS

GQA = {"mha": 4, "gqa": 2, "mqa": 1}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _attend(p, mask, size, rank, config, topology=None):
    """This rank's (out, lse, dq, dk, dv)."""
    topology = topology or Topology.from_group(dist.group.WORLD)
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout) for x in p)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*inputs, topology=topology, mask=mask, config=config, return_lse=True)
    out.backward(dout)
    return Result(out.detach(), lse.detach(), *(x.grad for x in inputs))


def _gathered(local, size, layout):
    """The whole sequence of each tensor, on every rank."""
    whole = []
    for x in local:
        parts = [torch.empty_like(x.contiguous()) for _ in range(size)]
        dist.all_gather(parts, x.contiguous())
        whole.append(unshard(parts, 1, layout=layout))
    return Result(*whole)


def _grid(rank, size, dtype):
    kernel = KERNELS["aten-cpu"]
    cases = itertools.product(layouts(size), MASKS, ("query", "kv"), GQA)
    for i, (layout, kind, direction, kv) in enumerate(cases):
        n = 16 * layout.divisor(size)
        p = problem(size, n, batch=2, kv_heads=GQA[kv], head_dim=32, dtype=dtype)
        config = BurstConfig(layout=layout, backward=direction)
        got = _gathered(_attend(p, MASKS[kind], size, rank, config), size, layout)
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
        *(pytest.param(2, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
        *(pytest.param(size, dtype, marks=pytest.mark.slow) for size in (3, 4) for dtype in DTYPES),
    ],
    ids=str,
)
def test_as_exact_as_the_kernel_alone(size, dtype):
    processes(size, _grid, dtype)


def _random(rank, size, seeds):
    for seed in seeds:
        draw = random.Random(seed)
        layout, kind, direction = (
            draw.choice(layouts(size)),
            draw.choice(("causal", "full")),
            draw.choice(("query", "kv")),
        )
        kv_heads, group, dtype = draw.randint(1, 3), draw.randint(1, 4), draw.choice(DTYPES)
        n = layout.divisor(size) * draw.randint(4, 12)
        p = problem(
            seed,
            n,
            batch=draw.randint(1, 3),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=draw.choice((8, 16, 40, 64)),
            dtype=dtype,
        )
        config = BurstConfig(layout=layout, backward=direction)
        got = _gathered(_attend(p, MASKS[kind], size, rank, config), size, layout)
        if seed % size != rank:
            continue
        bar = single_kernel(p, KERNELS["aten-cpu"], MASKS[kind])
        try:
            assert_as_exact_as(got, bar, dense(p, MASKS[kind]))
        except AssertionError as e:
            raise AssertionError(
                f"seed {seed}, {layout} {kind} {direction} {dtype} {tuple(p.k.shape)}: {e}"
            ) from e


@pytest.mark.parametrize(
    "size", [2, 3, pytest.param(5, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_random_shapes(size):
    processes(size, _random, range(20))


def _bytes(rank, size):
    sent = []
    batch = dist.batch_isend_irecv

    def counting(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = counting
    counted = {}
    for direction, (h, hkv), dtype, grad_dtype in itertools.product(
        ("query", "kv"), ((4, 4), (4, 1)), (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16)
    ):
        p = problem(0, 24 * size, heads=h, kv_heads=hkv, dtype=dtype)
        q, k, v, dout = (shard(x, 1, rank=rank, size=size) for x in p)
        q.requires_grad_()
        config = BurstConfig(ring="double", backward=direction, grad_dtype=grad_dtype)
        topology = Topology.from_group(dist.group.WORLD)
        sent.clear()
        out = burst_attention(q, k, v, topology=topology, mask=Mask.full(), config=config)
        forward = sum(sent)
        sent.clear()
        out.backward(dout)
        counted[direction, h, hkv, dtype.itemsize, grad_dtype.itemsize] = (forward, sum(sent))
    return counted


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_on_the_wire_are_the_formulas_on_every_rank(size):
    for counted in processes(size, _bytes):
        for (direction, heads, kv_heads, s, g), (forward, backward) in counted.items():
            n, d, d_kv = 24 * size, heads * 16, kv_heads * 16
            assert forward == 2 * n * d_kv * s * (size - 1) // size
            of_gradients = (size - 2) * g + min(s, g)
            if direction == "query":
                assert backward == n // size * ((size - 1) * (2 * d * s + 8 * heads) + d * of_gradients)
            else:
                assert backward == 2 * n // size * d_kv * ((size - 1) * s + of_gradients)


def _auto(rank, size):
    rotates, made = {}, []
    agreed = function.agree_on_call
    function.agree_on_call = lambda *args: made.append(agreed(*args)) or made[-1]
    for kv_heads in (8, 1):
        p = problem(0, 8 * size, heads=8, kv_heads=kv_heads, dtype=torch.float32)
        q, k, v, _ = (shard(x, 1, rank=rank, size=size).requires_grad_() for x in p)
        burst_attention(q, k, v, topology=Topology.from_group(dist.group.WORLD), mask=Mask.causal())
        call, *_ = made[-1]
        rotates[kv_heads] = call.direction
    return rotates


def test_auto_rotates_what_is_cheaper():
    assert processes(2, _auto) == [{8: "query", 1: "kv"}] * 2


def _odd_uses(rank, size):
    """Strides, autocast, several calls in flight, a gradient for one input only, lse gradients."""
    topology = Topology.from_group(dist.group.WORLD)
    p = problem(7, 8 * size, batch=2, kv_heads=2, dtype=torch.float32)
    want = dense(p, Mask.causal())

    def local(x):
        return shard(x, 1, rank=rank, size=size)

    sequence_first = [local(x).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in p[:3]]
    every_other = [torch.stack([local(x)] * 2, -1)[..., 0].requires_grad_() for x in p[:3]]
    config = BurstConfig(backward="query")
    outs = [
        burst_attention(*x, topology=topology, mask=Mask.causal(), config=config)
        for x in (sequence_first, every_other)
    ]
    for out, x in zip(outs, (sequence_first, every_other), strict=True):  # first in, first out: 1F1B's order
        (out * local(p.dout)).sum().backward()
        for got, whole in zip(
            (out, *(t.grad for t in x)), (want.out, want.dq, want.dk, want.dv), strict=True
        ):
            assert error(got, local(whole)) < 2e-6
    q, k, v = (local(x) for x in p[:3])
    v.requires_grad_()
    out = burst_attention(q, k, v, topology=topology, mask=Mask.causal())
    out.sum().backward()  # the gradient is an expanded scalar, without strides
    sums = dense(p._replace(dout=torch.ones_like(p.dout)), Mask.causal())
    assert error(v.grad, local(sums.dv)) < 2e-6
    halves = [x.detach().bfloat16() for x in (q, k, v)]
    halves[2].requires_grad_()
    want_cast = burst_attention(*halves, topology=topology, mask=Mask.causal())
    want_cast.sum().backward()
    v.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = burst_attention(q, k, v, topology=topology, mask=Mask.causal())
        assert torch.equal(out, want_cast)
        out.sum().backward()
    assert torch.equal(v.grad, halves[2].grad.float())
    q, k, v = (local(x).requires_grad_() for x in p[:3])
    config = BurstConfig(kernel="reference", backward="query")
    out, lse = burst_attention(q, k, v, topology=topology, mask=Mask.causal(), config=config, return_lse=True)
    dlse = problem(8, 8 * size, batch=2, head_dim=1, dtype=torch.float32).q[..., 0]
    ((out * local(p.dout)).sum() + (lse * local(dlse)).sum()).backward()
    want = dense(p, Mask.causal(), dlse=dlse)
    for got, whole in zip((q.grad, k.grad, v.grad), (want.dq, want.dk, want.dv), strict=True):
        assert error(got, local(whole)) < 2e-6
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_strides_autocast_calls_in_flight_and_lse_gradients(size):
    assert all(processes(size, _odd_uses))


def _received(rank, size):
    return torch.empty(4).isnan().all().item() and torch.empty_like(torch.ones(3)).isnan().all().item()


def test_buffers_are_poisoned_in_the_processes_too():
    assert processes(2, _received) == [True, True]


def _massive(rank, size, mask):
    p = share_score(problem(12, 88, batch=6, dtype=torch.float32), 0.0)
    ways = {"backward": "query"}, {"backward": "kv"}
    for score, kernel, way in itertools.product((30.0, 1000.0, ALTERNATING), ("aten-cpu", "reference"), ways):
        p = share_score(p, score)
        got = _gathered(_attend(p, mask, size, rank, BurstConfig(kernel=kernel, **way)), size, "zigzag")
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
        got = _gathered(_attend(p, Mask.full(), size, rank, config), size, "zigzag")
        errors[grad_dtype] = error(got.dq, dense(p, Mask.full()).dq)
    return errors[torch.float32], errors[torch.bfloat16]


def test_float32_gradients_on_the_wire_are_more_exact_than_bfloat16():
    wide, narrow = processes(4, _narrow_gradients)[0]
    assert wide < narrow < 4 * wide


def test_float64_is_exact_to_the_last_digits_with_the_default_config():
    p = problem(10, 24, dtype=torch.float64)
    q, k, v, dout = (x.requires_grad_() for x in p)
    out = burst_attention(q, k, v, topology=Topology.single(), mask=Mask.causal())
    out.backward(dout.detach())
    want = dense(p, Mask.causal())
    for got, w in zip((out, q.grad, k.grad, v.grad), (want.out, want.dq, want.dk, want.dv), strict=True):
        assert error(got, w) < 1e-13


def test_softmax_scale():
    p = problem(11, 16)
    got = burst_attention(*p[:3], topology=Topology.single(), mask=Mask.full(), softmax_scale=0.7)
    assert error(got, dense(p, Mask.full(), scale=0.7).out) < 1e-13
