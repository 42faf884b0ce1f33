"""Rings of gloo ranks that share one GPU, and streams."""

import pytest
import torch
import torch.distributed as dist
from dense import Result, assert_as_exact_as, dense, error, problem
from ranks import processes
from staging import stage

from burst_bench.methods.virtual_rank import VirtualRank
from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import shard, unshard

MASKS = {
    "causal": (Mask.causal(), "auto"),
    "window": (Mask.window(40, 0), "auto"),
    "documents": (Mask.causal() & Mask.documents([0, 50, 51, 200, 256]), "triton"),
}
"""Masks, and the kernels that they are tested with."""
CELLS = [(mask, direction) for mask in MASKS for direction in ("query", "kv")]


def _problem():
    return problem(0, 256, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def _ring(rank, size, mask, config):
    topology, p = Topology.from_group(dist.group.WORLD, intra_size=2), _problem()
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout).cuda() for x in p)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = burst_attention(*inputs, topology=topology, mask=mask, config=config, return_lse=True)
    out.backward(dout)
    return [x.detach().cpu() for x in (out, lse, *(x.grad for x in inputs))]


def _rings(rank, size):
    """What this rank has of each cell. After an error there are no more: later calls would be refused."""
    torch.cuda.set_device(0)
    stage()
    found = {}
    for name, direction in CELLS:
        mask, kernel = MASKS[name]
        try:
            found[name, direction] = _ring(rank, size, mask, BurstConfig(backward=direction, kernel=kernel))
        except Exception as error:
            error.add_note(f"in the cell {name}-{direction}, after {list(found)}")
            raise
    return found


@pytest.fixture(scope="module", params=[2, 4])
def rings(request):
    """By rank: starting them takes longer than what they do."""
    return processes(request.param, _rings, start="spawn")


@pytest.mark.parametrize(("name", "direction"), CELLS)
def test_ranks_on_one_gpu_equal_float64(rings, name, direction):
    shares = [share[name, direction] for share in rings]
    whole = [unshard([share[i] for share in shares], 1, layout="zigzag") for i in range(5)]
    p, (mask, kernel) = _problem(), MASKS[name]
    inputs = [x.cuda().requires_grad_() for x in p[:3]]
    single = {"topology": Topology.single(), "mask": mask, "config": BurstConfig(kernel=kernel)}
    out, lse = burst_attention(*inputs, **single, return_lse=True)  # the same kernel on one device
    out.backward(p.dout.cuda())
    bar = Result(*(x.detach().cpu() for x in (out, lse, *(x.grad for x in inputs))))
    assert_as_exact_as(Result(*whole), bar, dense(p, mask))


def _shard(tokens, heads):
    return Shard(
        batch=1,
        tokens=tokens,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
    )


def test_a_virtual_rank_gives_the_same_every_time():
    # Copies on another stream into buffers that are used again: a missing wait would show as a difference.
    rank = VirtualRank(_shard(2048, 8), 4, mask=Mask.causal())
    runs = []
    for _ in range(4):
        done = rank.forward()
        runs.append((done.out, done.ring_lse, *rank.backward(done)))
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for run in runs for x in run)
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)  # kernels may add up in any order


class Layer(torch.nn.Module):
    """As a model has it: a norm, projections, attention with fewer K/V heads, and a residual."""

    def __init__(self, heads=4, kv_heads=2, dim=64):
        super().__init__()
        self.topology, self.mask, self.config = Topology.single(), Mask.causal(), BurstConfig()
        self.heads, width = (heads, kv_heads, kv_heads), heads * dim
        self.norm = torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, sum(self.heads) * dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)
        attended = burst_attention(q, k, v, topology=self.topology, mask=self.mask, config=self.config)
        return x + self.out(attended.flatten(2))


def test_inductor_compiles_a_layer():
    layer = Layer().to("cuda", torch.bfloat16)
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        out = run(x)
        found.append([out, *torch.autograd.grad(out.float().square().mean(), leaves)])
    for got, want in zip(found[1], found[0], strict=True):
        assert error(got, want) < 2e-2
