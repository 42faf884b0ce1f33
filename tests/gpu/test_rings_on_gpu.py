"""Rings of gloo ranks that share one GPU, streams, and captured graphs."""

import pytest
import torch
import torch.distributed as dist
from dense import Result, assert_as_exact_as, dense, problem
from ranks import processes

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention.arguments import Shape
from burst_mcore.attention.topology import Topology
from burst_mcore.bench.virtual_ring import VirtualRank
from burst_mcore.layout import shard, unshard


def _ring(rank, size, mask, config, dtype):
    torch.cuda.set_device(0)
    topology = Topology.from_group(dist.group.WORLD, intra_size=2)
    p = problem(0, 256, heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout).cuda() for x in p)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*inputs, topology=topology, mask=mask, config=config, return_lse=True)
    out.backward(dout)
    return [x.detach().cpu() for x in (out, lse, *(x.grad for x in inputs))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("direction", ["query", "kv"])
@pytest.mark.parametrize(
    ("mask", "kernel"),
    [
        (Mask.causal(), "auto"),
        (Mask.window(40, 0), "auto"),
        (Mask.causal() & Mask.documents([0, 50, 51, 200, 256]), "triton"),
    ],
    ids=["causal", "window", "documents"],
)
def test_ranks_on_one_gpu_equal_float64(mask, kernel, direction, size):
    config = BurstConfig(backward=direction, kernel=kernel)
    shares = processes(size, _ring, mask, config, torch.bfloat16, start="spawn")
    whole = [unshard([share[i] for share in shares], 1, layout="zigzag") for i in range(5)]
    p = problem(0, 256, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    inputs = [x.cuda().requires_grad_() for x in p[:3]]
    single = {"topology": Topology.single(), "mask": mask, "config": config}
    out, lse = burst_attention(*inputs, **single, return_lse=True)  # the same kernel on one device
    out.backward(p.dout.cuda())
    bar = Result(*(x.detach().cpu() for x in (out, lse, *(x.grad for x in inputs))))
    assert_as_exact_as(Result(*whole), bar, dense(p, mask))


@pytest.mark.parametrize("source", ["device", "host"])
def test_a_virtual_rank_gives_the_same_every_time(source):
    # Copies on another stream into buffers that are used again: a missing wait would show as a difference.
    rank = VirtualRank(Shape(1, 2048, 8, 8, 128, 128), 4, mask=Mask.causal(), source=source, poison=True)
    runs = []
    for _ in range(4):
        done = rank.forward()
        runs.append((done.out, done.ring_lse, *rank.backward(done)))
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for run in runs for x in run)
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)  # kernels may add up in any order


def test_a_step_can_be_captured():
    rank = VirtualRank(Shape(1, 1024, 4, 4, 128, 128), 4, mask=Mask.causal(), source="device")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # everything is compiled and made before the capture
        for _ in range(2):
            done = rank.forward()
            want = rank.backward(done)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        done = rank.forward()
        got = rank.backward(done)
    for x in (done.out, *got):
        x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def _compiled():
    topology, mask, config = Topology.single(), Mask.causal(), BurstConfig()

    def attend(q, k, v):
        return burst_attention(q, k, v, topology=topology, mask=mask, config=config) * 2

    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return attend, (q, k, v)


def test_inductor_compiles_it():
    attend, inputs = _compiled()
    compiled = torch.compile(attend, fullgraph=True)
    grads = []
    for run in (attend, compiled):
        fresh = [x.clone().requires_grad_() for x in inputs]
        out = run(*fresh)
        out.sum().backward()
        grads.append([out, *(x.grad for x in fresh)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
