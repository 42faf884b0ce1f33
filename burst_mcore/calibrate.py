"""Measures the rates of this machine's processes: kernel, memory, hops and exchanges over gloo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.autotune.cost import pass_flops
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.bench.launch import in_processes
from burst_mcore.bench.methods.bare import both_ways, scores_of
from burst_mcore.bench.methods.sharded import share_of
from burst_mcore.machines import CPU
from burst_mcore.rates import Rates

HEADS, HEAD_DIM = 4, 64
TILES = (256, 1024)
"""Rows and keys of the two square tiles that give the rate of a kernel, and its `fill`."""
MESSAGES = (2**12, 2**22)
"""Bytes of the two messages that give the latency and the rate of a hop."""
COPIED = 2**26
"""Bytes that are copied to measure memory: more than caches hold."""


@dataclass(frozen=True)
class Line:
    """A straight line through two measurements: seconds = start + slope x."""

    start: float
    slope: float

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Line:
        """Return the line through two points, neither of its numbers negative."""
        (x, y), (further, later) = first, second
        slope = max((later - y) / (further - x), 1e-15)
        return cls(max(0.0, y - slope * x), slope)


def calibrate(ranks: int, repeats: int = 5) -> Rates:
    """Return the rates that `ranks` processes of this machine reach together, the least of several times.

    Links between machines are not measured: `inter` is the share of `intra` that `machines.CPU` assumes.

    Raises:
        ValueError: fewer than two ranks, or no repeat.
    """
    if ranks < 2 or repeats < 1:
        raise ValueError(f"calibrate needs two ranks and one repeat at least, got {ranks} and {repeats}")
    per_rank: list[Rates] = in_processes(ranks, _measured, repeats)
    return per_rank[0]


def _measured(rank: int, size: int, repeats: int) -> Rates:
    forward, backward = _kernel(repeats)
    source = torch.zeros(COPIED // 4)
    copy = _least(partial(torch.empty_like(source).copy_, source), repeats)
    hop = _line_of(partial(_hop, rank, size), repeats)
    exchange = _line_of(partial(_exchange, size), repeats)
    intra = 1 / hop.slope
    crowding = math.log(max(1.0, exchange.slope / hop.slope)) / math.log(size / 2) if size > 2 else 0.0
    return Rates(
        intra=intra,
        inter=intra * CPU.inter / CPU.intra,
        compute=_flops(Pass.FORWARD) / forward.slope,
        backward=_flops(Pass.KV) / backward.slope,
        memory=2 * COPIED / copy,
        fill=forward.start / forward.slope,
        latency=hop.start,
        crowding=crowding,
        hidden=False,
    )


def _flops(pass_: Pass) -> int:
    """Return the FLOPs of a query-key pair."""
    return pass_flops(share_of(TILES[-1], HEADS, HEADS, HEAD_DIM), 1, pass_)


def _kernel(repeats: int) -> tuple[Line, Line]:
    """Return the seconds of a query row by the keys that the row sees, in forward and in backward."""
    kernel = choose("auto", Problem("cpu", torch.float32, HEADS, HEADS, HEAD_DIM, HEAD_DIM))
    forward, backward = [], []
    for n in TILES:
        q, k, v, dout = torch.randn(4, 1, n, HEADS, HEAD_DIM).unbind()
        pattern = Pattern((n, n))
        alone = _least(partial(kernel.forward, q, k, v, pattern, scores_of(q)), repeats)
        both = _least(partial(both_ways, kernel, pattern, q, k, v, dout), repeats)
        forward.append((float(n), alone / n))
        backward.append((float(n), max(both - alone, alone) / n))
    return Line.through(*forward), Line.through(*backward)


def _line_of(transfer: Callable[[Tensor], object], repeats: int) -> Line:
    """Return the seconds of a transfer by the bytes that a rank sends to each other rank that takes part."""
    points = [(float(size), _least(partial(transfer, torch.zeros(size // 4)), repeats)) for size in MESSAGES]
    return Line.through(*points)


def _hop(rank: int, size: int, message: Tensor) -> None:
    """Send to the next rank, receive from the rank before."""
    came = torch.empty_like(message)
    ends = ((dist.isend, message, (rank + 1) % size), (dist.irecv, came, (rank - 1) % size))
    for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
        work.wait()


def _exchange(size: int, message: Tensor) -> None:
    """Send a part of a message to each other rank."""
    parts = message[: len(message) // (size - 1) * (size - 1)].view(size - 1, -1)
    rank = dist.get_rank()
    ends = []
    for index, offset in enumerate(range(1, size)):
        ends.append(dist.P2POp(dist.isend, parts[index], (rank + offset) % size))
        ends.append(dist.P2POp(dist.irecv, torch.empty_like(parts[index]), (rank - offset) % size))
    for work in dist.batch_isend_irecv(ends):
        work.wait()


def _least(call: Callable[[], object], repeats: int) -> float:
    """Return the least seconds of a call that all ranks make together, the largest of all ranks each time."""
    least = math.inf
    for index in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        least = min(least, float(seconds)) if index else least  # the first call warms up
    return least
