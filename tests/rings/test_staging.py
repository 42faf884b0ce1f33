"""Messages by way of host memory, as for tensors on a GPU over gloo; here every tensor takes that way."""

import torch
import torch.distributed as dist
from dense import dense, error, problem
from ranks import processes
from staging import stage

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import shard


def _staged(rank, size, direction):
    staged = stage()
    topology, mask = Topology.from_group(dist.group.WORLD, intra_size=2), Mask.causal()
    p = problem(0, 16 * size, kv_heads=2)
    q, k, v, dout = (shard(x, 1, rank=rank, size=size) for x in p)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = burst_attention(*inputs, topology=topology, mask=mask, config=BurstConfig(backward=direction))
    out.backward(dout)
    want = dense(p, mask)
    for got, whole in zip(
        (out, *(x.grad for x in inputs)), (want.out, want.dq, want.dk, want.dv), strict=True
    ):
        assert error(got, shard(whole, 1, rank=rank, size=size)) < 1e-12
    return any(staged) and not all(staged)


def _reached(rank, size):
    communicators = Topology.from_group(dist.group.WORLD).communicators
    return [communicators.reach(torch.device(device)) for device in ("cpu", "cuda", "meta")]


def test_gloo_reaches_host_memory_alone():
    assert processes(2, _reached) == [[True, False, False]] * 2


def test_staged_messages_arrive_whole():
    for direction in ("query", "kv"):
        assert all(processes(4, _staged, direction))
