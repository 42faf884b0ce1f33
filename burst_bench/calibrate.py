"""Measures the rates of ranks: kernel, memory, messages and exchanges within nodes and between them.

The same code measures processes of a CPU over gloo and GPUs over NCCL. On GPUs, and between real machines, it
was never run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from burst_bench.core import Trial, World
from burst_bench.launch import in_processes, joined
from burst_bench.methods.attention import share_of
from burst_bench.methods.kernels import both_ways, scores_of
from burst_bench.stage import one_round
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.rates import CPU, Rates
from burst_plan.simulate.cost import pass_flops


@dataclass(frozen=True)
class LineSizes:
    """The measured sizes on a device: two points of each straight line, in tokens or bytes."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    tiles: tuple[int, int]
    """Rows and keys of the two square tiles that give the rate of a kernel, and its `fill`."""
    messages: tuple[int, int]
    """Bytes of the two messages that give the latency and the rate of a link."""
    copied: int
    """Bytes of a copy that measures memory: more than caches hold."""


SIZES = {
    "cpu": LineSizes(4, 64, torch.float32, (256, 1024), (2**12, 2**22), 2**26),
    "cuda": LineSizes(16, 128, torch.bfloat16, (2048, 16384), (2**16, 2**27), 2**31),
}


@dataclass(frozen=True)
class Line:
    """A straight line through two measurements: seconds = start + slope x."""

    start: float
    slope: float

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """Return the line through two points, with both numbers at least 0.

        If the second took hardly longer, the machine was busy: then the line goes through it and the origin.
        """
        (x, y), (further, later) = first, second
        if later - y < later / 10:
            return cls(0.0, later / further)
        slope = (later - y) / (further - x)
        return cls(max(0.0, y - slope * x), slope)


@dataclass(frozen=True)
class Found:
    """Measured rates, and the ranks that measured them."""

    rates: Rates
    ranks: Ranks
    rank: int = 0
    """The rank of this process."""

    @property
    def one_node(self) -> bool:
        """Whether no link between machines was measured."""
        return self.ranks.intra == self.ranks.size

    @property
    def words(self) -> str:
        return f"{self.ranks.size} ranks" + f", {self.ranks.intra} of a node" * (not self.one_node)


def measure(ranks: int | None, repeats: int, device: str = "cpu") -> Found:
    """Return the rates that ranks reach together: in fresh processes, or in torchrun's processes."""
    if device not in SIZES or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"no device {device!r} here; legal: cpu, and cuda where there is a GPU")
    launched = dist.is_torchelastic_launched()
    if device == "cuda" and not launched:
        command = "torchrun --nproc-per-node 8 --no-python burst-mcore calibrate --device cuda"
        raise ValueError(f"GPUs need a process for each: {command}")
    size = node = 2 if ranks is None else ranks
    if launched:
        size, node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks not in (None, size):
        raise ValueError(f"torchrun started {size} ranks, and --ranks wants {ranks}")
    if size < 2 or repeats < 1 or size % node:
        raise ValueError(
            f"calibrate needs two ranks at least, on nodes of one size, and one repeat at least; got "
            f"{size} ranks, {node} of a node, and {repeats} repeats"
        )
    if not launched:
        rates, *_ = in_processes(size, measured, node, repeats)
        return Found(rates, Ranks(size, node))
    with joined(device):
        rank = dist.get_rank()
        return Found(measured(rank, size, node, repeats, device), Ranks(size, node), rank)


def measured(rank: int, size: int, node: int, repeats: int, device: str = "cpu") -> Rates:
    """Return the measured rates of ranks, with `node` consecutive ranks per node. Collective.

    On one node `inter` is not measured: it is the share of `intra` that `machines.CPU` assumes.
    """
    world, sizes = World(rank, size, device), SIZES[device]
    shard = share_of(sizes.tiles[-1], sizes.heads, sizes.heads, sizes.head_dim)
    forward, backward = _kernel(world, sizes, repeats)
    source = torch.zeros(sizes.copied // 4, device=world.device)
    copy = least(partial(torch.empty_like(source).copy_, source), world, repeats)
    on_node = list(range(rank // node * node, rank // node * node + node))
    of_nodes = list(range(rank % node, size, node))
    inner = _link(world, on_node, 1, repeats) if node > 1 else None
    outer = _link(world, of_nodes, 1, repeats) if len(of_nodes) > 1 else None
    link = inner or outer
    assert link is not None
    intra, crowding = 1 / link.slope, 0.0
    if node > 2:
        to_all = _link(world, on_node, node - 1, repeats)
        crowding = math.log(max(1.0, to_all.slope / link.slope)) / math.log(node / 2)
    return Rates(
        intra=intra, inter=intra * CPU.inter / CPU.intra if outer is None else min(intra, 1 / outer.slope),
        compute=pass_flops(shard, 1, Pass.FORWARD) / forward.slope,
        backward=pass_flops(shard, 1, Pass.KV) / backward.slope,
        memory=2 * sizes.copied / copy, fill=forward.start / forward.slope, latency=link.start,
        crowding=crowding, hidden=world.device == "cuda",
    )  # fmt: skip


def _kernel(world: World, sizes: LineSizes, repeats: int) -> tuple[Line, Line]:
    """Return the seconds of a query row by the number of its keys, in forward and in backward."""
    heads, dim = sizes.heads, sizes.head_dim
    kernel = choose("auto", Problem(world.device, sizes.dtype, heads, heads, dim, dim))
    forward, backward = [], []
    for n in sizes.tiles:
        q, k, v, dout = torch.randn(4, 1, n, heads, dim, device=world.device).to(sizes.dtype).unbind()
        pattern = Pattern((n, n))
        forward_seconds = least(partial(kernel.forward, q, k, v, pattern, scores_of(q)), world, repeats)
        pair_seconds = least(partial(both_ways, kernel, pattern, q, k, v, dout), world, repeats)
        forward.append((float(n), forward_seconds / n))
        backward.append((float(n), max(pair_seconds - forward_seconds, forward_seconds) / n))
    return Line.through(*forward), Line.through(*backward)


def _link(world: World, members: Sequence[int], others: int, repeats: int) -> Line:
    """Return the seconds of messages to the next `others` of some ranks, by the bytes that a rank sends.

    All ranks do the same at once: messages around a ring for one other, an all-to-all for all others.
    """
    place, points = members.index(world.rank), []
    ends = [
        (members[(place + offset) % len(members)], members[place - offset]) for offset in range(1, others + 1)
    ]
    for size in SIZES[world.device].messages:
        message = torch.zeros(size // 4, device=world.device)
        points.append((float(message.nbytes), least(partial(exchange, ends, message), world, repeats)))
    return Line.through(*points)


def exchange(ends: Sequence[tuple[int, int]], message: Tensor) -> None:
    """Send a slice of the message to the first rank of each of `ends`; receive one from the second."""
    under_way = []
    for part, (to, back) in zip(message.tensor_split(len(ends)), ends, strict=True):
        under_way.append(dist.P2POp(dist.irecv, torch.empty_like(part), back))
        under_way.append(dist.P2POp(dist.isend, part, to))
    for work in dist.batch_isend_irecv(under_way):
        work.wait()


def least(call: Callable[[], object], world: World, repeats: int) -> float:
    """Return the least seconds of a call that all ranks make together; each time is the slowest rank's."""
    trial = Trial({"": call})
    walls = [one_round(trial, "", world)["wall"] for _ in range(repeats + 1)]
    return min(walls[1:])  # the first call warms up
