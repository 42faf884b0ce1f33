"""Softcap, sinks, gradients through lse, unequal head dims, determinism."""

from dataclasses import replace

import pytest
import torch
from cells import crossed
from dense import (
    Result,
    assert_sinks_as_exact_as,
    dense,
    error,
    problem,
    single_kernel,
    sinks_terms,
)
from ranks import processes

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import KERNELS, taking_delta
from burst_mcore.attention.kernels.wrappers import takes_delta
from burst_mcore.attention.request import Options, Tensors, validate
from burst_mcore.attention.resolve import call_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import shard


def _attend(p, mask, *, rank=0, size=1, topology=None, config=None, dlse=None, sinks=None, **options):
    """The rank's share of the results, and of the sinks' gradient."""
    config = config or BurstConfig()

    def local(x):
        return shard(x, 1, rank=rank, size=size, layout=config.layout)

    inputs = [local(x).detach().requires_grad_() for x in p[:3]]
    sinks = None if sinks is None else sinks.detach().to(p.q.dtype).requires_grad_()
    topology = topology or Topology.single()
    out, lse = burst_attention(
        *inputs, topology=topology, mask=mask, config=config, return_lse=True, sinks=sinks, **options
    )
    loss = (out * local(p.dout)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * local(dlse).to(lse.dtype)).sum()
    loss.backward()
    got = Result(out.detach(), lse.detach(), *(x.grad for x in inputs))
    return got, None if sinks is None else sinks.grad


OPTIONS = {
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "sinks": {"sinks": torch.tensor([1.0, -3.0, 0.5, 6.0])},
    "lse": {"dlse": problem(5, 48, batch=2, head_dim=1).q[..., 0]},
    "all": {
        "softcap": 3.0,
        "sinks": torch.tensor([1.0, -3.0, 0.5, 6.0]),
        "dlse": problem(5, 48, batch=2, head_dim=1).q[..., 0],
    },
}


def _wanted(p, mask, options):
    sinks = options.get("sinks")
    sinks = None if sinks is None else sinks.double().requires_grad_()
    others = {name: options[name] for name in ("softcap", "dlse") if name in options}
    return dense(p, mask, options.get("softmax_scale"), sinks=sinks, **others), sinks


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full(), Mask.window(7, 3)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_on_one_rank_equal_float64(option, mask, kv_heads, kernel):
    p = problem(0, 48, batch=2, kv_heads=kv_heads)
    want, sinks = _wanted(p, mask, OPTIONS[option])
    got, dsinks = _attend(p, mask, config=BurstConfig(kernel=kernel), **OPTIONS[option])
    for name, g, w in zip(want._fields, got, want, strict=True):
        assert error(g, w) < 1e-12, name
    if sinks is not None:
        assert error(dsinks, sinks.grad) < 1e-12


def _on_ring(rank, size, option, config):
    topology = Topology.from_group(torch.distributed.group.WORLD, intra_size=2)
    p, mask = problem(0, 48, batch=2), Mask.causal()
    want, sinks = _wanted(p, mask, OPTIONS[option])
    got, dsinks = _attend(p, mask, rank=rank, size=size, topology=topology, config=config, **OPTIONS[option])
    for name, g, w in zip(want._fields, got, want, strict=True):
        assert error(g, shard(w, 1, rank=rank, size=size, layout=config.layout)) < 1e-12, name
    if sinks is not None:
        torch.distributed.all_reduce(dsinks)
        assert error(dsinks, sinks.grad) < 1e-12
    return True


@pytest.mark.parametrize(
    ("backward", "degree", "option"),
    crossed(
        ("query", "kv"),
        (1, 2),
        OPTIONS,
        quick=lambda backward, degree, option: option == "all" or (backward == "kv") == (degree == 2),
    ),
)
def test_options_on_a_ring_equal_float64(option, degree, backward):
    config = BurstConfig(backward=backward, head_parallel=degree)
    assert all(processes(4, _on_ring, option, config))


def _sinks_in_float32(rank, size, seeds):
    topology, mask = Topology.from_group(torch.distributed.group.WORLD), Mask.causal()
    least = 1.0
    for seed in seeds:
        p = problem(seed, 48, batch=2, dtype=torch.float32)
        options = OPTIONS["sinks"] | {"dlse": OPTIONS["lse"]["dlse"] if seed % 2 else None}
        want, sinks = _wanted(p, mask, options)
        terms = sinks_terms(p, want, options["sinks"], options["dlse"])
        _, got = _attend(p, mask, rank=rank, size=size, topology=topology, **options)
        own = got.clone()
        torch.distributed.all_reduce(got)
        _, bar = _attend(p, mask, **options)
        assert_sinks_as_exact_as(got, bar, sinks.grad, terms)
        for wrong in (got - own, got + 1e-6 * terms, got * torch.nan):  # a rank left out; ten roundings
            with pytest.raises(AssertionError, match="times as inexact"):
                assert_sinks_as_exact_as(wrong, bar, sinks.grad, terms)
        least = min(least, (sinks.grad.abs() / terms).min().item())
    return least


def test_gradients_of_sinks_are_as_exact_as_on_one_device():
    """Where their terms cancel, too: then a rounding of the terms is many of their sum."""
    assert processes(2, _sinks_in_float32, range(10))[0] < 1e-2


@pytest.mark.parametrize("kernel", ["aten-cpu", "reference"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (16, 24), (192, 128)])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(7, 3)], ids=str)
def test_values_may_be_narrower_or_wider_than_keys(mask, head_dim, value_dim, kernel):
    p = problem(1, 48, kv_heads=2, head_dim=head_dim, value_dim=value_dim)
    got = single_kernel(p, KERNELS[kernel], mask)
    for name, g, w in zip(got._fields, got, dense(p, mask), strict=True):
        assert error(g, w) < 1e-12, name


def test_kernels_are_told_to_be_deterministic():
    q = torch.zeros(1, 8, 2, 8)
    topology = Topology.single()
    options = Options(topology, Mask.causal(), BurstConfig(deterministic=True))
    call = call_of.__wrapped__(validate(Tensors(q, q, q), options), (8,))
    assert call.problem.deterministic and call.scores.deterministic
    ask = replace(call.problem, device="cuda", dtype=torch.bfloat16)
    for name in ("cudnn", "aten-flash"):
        assert "deterministic" in KERNELS[name].supports(ask)


def test_a_gradient_through_lse_passes_over_kernels_that_cannot_take_it():
    ask = Problem("cuda", torch.bfloat16, 8, 8, 128, 128)
    assert "136" in takes_delta(KERNELS["cudnn"]).supports(ask)
    assert taking_delta("auto", ask).name in ("aten-flash", "triton")  # what is there without packages
    with pytest.raises(ValueError, match="gradient came through lse.*cudnn: .*136"):
        taking_delta("cudnn", ask)


def test_a_sink_of_minus_infinity_is_none():
    p = problem(0, 16)
    sinks = torch.tensor([-torch.inf, 0.5, -torch.inf, 1.0])
    mask = Mask.window(3, 0) & Mask.ranges([(4, 16)], [(0, 16)])  # the first queries see nothing
    got, dsinks = _attend(p, mask, sinks=sinks)
    alone, _ = _attend(p, mask)
    assert torch.equal(dsinks[::2], torch.zeros(2, dtype=dsinks.dtype))
    assert error(got.out[:, :, ::2], alone.out[:, :, ::2]) < 1e-12 and got.dq.isfinite().all()
