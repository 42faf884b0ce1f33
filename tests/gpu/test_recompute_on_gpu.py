"""Recompute policies on a GPU: gradients, memory, and what is kept in host memory."""

from functools import partial

import pytest
import torch

from burst_mcore import BurstConfig, Mask, Topology, burst_attention
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment, checkpoint

N, HEADS, DIM, LAYERS = 2048, 8, 64, 4
POLICIES = {
    "full": Full(),
    "keep": KeepAttention(),
    "segment": Segment(0.5),
    "keep, offloaded": Offload(KeepAttention()),
    "segment, offloaded": Offload(Segment(0.5)),
}


def _layers(topology, config, width):
    torch.manual_seed(0)
    weights = [torch.randn(3 * width, width, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]

    def layer(weight, x):
        q, k, v = (x @ (weight / width**0.5).T).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        out = burst_attention(q, k, v, topology=topology, mask=Mask.causal(), config=config)
        return x + out.flatten(2)

    return [partial(layer, weight.requires_grad_()) for weight in weights], weights


def _step(policy, layers, weights, x):
    for leaf in (*weights, x):
        leaf.grad = None
    y = x
    for layer in layers:
        y = layer(y) if policy is None else checkpoint(layer, y, policy=policy)
    y.float().square().mean().backward()
    return [leaf.grad.float().clone() for leaf in (x, *weights)]


def _close(got, want, policy):
    for a, b in zip(got, want, strict=True):
        if isinstance(policy, (Full, KeepAttention)):
            assert torch.equal(a, b)
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without(policy):
    width = HEADS * DIM
    layers, weights = _layers(Topology.single(), BurstConfig(layout="striped", deterministic=True), width)
    x = torch.randn(1, N, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    want = _step(None, layers, weights, x)
    for _ in range(3):  # buffers that are used again would show
        _close(_step(POLICIES[policy], layers, weights, x), want, POLICIES[policy])


def _kept(policy):
    """Bytes of GPU memory that a forward leaves behind, less those of plain checkpointing."""
    width, found = HEADS * DIM, []
    layers, weights = _layers(Topology.single(), BurstConfig(layout="striped"), width)
    x = torch.randn(1, N, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for each in (Full(), policy):
        _step(each, layers, weights, x)
        torch.cuda.synchronize()
        before, y = torch.cuda.memory_allocated(), x
        for layer in layers:
            y = checkpoint(layer, y, policy=each)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
        del y
    return found[1] - found[0]


def test_memory_kept():
    of_all = LAYERS * N * HEADS * (2 * DIM + 4)
    assert _kept(KeepAttention()) == pytest.approx(of_all, rel=0.02)
    assert _kept(Segment(0.5)) == pytest.approx(of_all / 2, rel=0.02)
    assert _kept(Offload(KeepAttention())) <= 0.02 * of_all
