"""Runs methods side by side: every rank a process over gloo, every clock behind a correctness gate."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.autotune.choose import Ranks
from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.kernels import kernel, reference, table
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.trace import Event, record
from burst_mcore.bench.methods import METHODS, Method
from burst_mcore.config import BurstConfig
from burst_mcore.explain.problem import Problem
from burst_mcore.layout import shard, unshard
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

GATE_TOKENS = 512
"""Length of the sequence on which a method must be right before it is timed, at most."""
TABLE_TOKENS = 8192
"""The longest sequence over which the bare kernel gets a mask as a table of queries x keys."""


@dataclass(frozen=True)
class Result:
    """Forward + backward, medians over repeats."""

    method: str
    ranks: int
    cpu_seconds: float
    """Summed over the ranks, all threads."""
    wall_seconds: float
    cpu_of_kernel: float
    """cpu_seconds over those of the bare kernel on one process, its repeats in turn with this method's."""
    error: float
    """The worst that the gate saw, as a multiple of the kernel's own."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def bare_kernel(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """(out, dq, dk, dv) of the whole sequence by one call of the local kernel each way.

    Masks besides causal and full go in as a table, without a word on what it lets the kernel skip.

    Raises:
        ValueError: the sequence is too long for that.
    """
    chosen, how, seen = (
        table.choose("auto", problem.on_kernel),
        kernel.Scores(problem.head_dim**-0.5),
        _seen_by_kernel(problem),
    )
    if seen.masked and not chosen.abilities.masks:
        chosen = table.KERNELS["reference"]

    def attend(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse = chosen.forward(q, k, v, seen, how)
        delta = row_delta(dout, out) if chosen.takes_delta else lse  # others form it from out themselves
        x = kernel.RowGradients(dout, q, k, v, out, lse, delta)
        return out, *chosen.backward(x, seen, how)

    return attend


def _seen_by_kernel(problem: Problem) -> Seen:
    """The mask as a kernel takes it."""
    whole = problem.seq, problem.seq
    if problem.seen in (Mask.causal(), Mask.full()):
        return Seen(whole, high=0 if problem.seen == Mask.causal() else None)
    if problem.seq > TABLE_TOKENS:
        raise ValueError(
            f"the bare kernel, which methods are measured beside, takes mask {problem.mask!r} as a table of "
            f"queries x keys, over at most {TABLE_TOKENS} tokens, got {problem.seq}: use a shorter sequence, "
            f"or causal or full"
        )
    at = torch.arange(problem.seq)
    return Seen.by(problem.seen.allows(at, at))


def measure(problem: Problem, ranks: int, names: Sequence[str], repeats: int) -> list[Result]:
    """Measure methods that lack nothing, and at one rank the whole path of burst beside the bare kernel.

    Raises:
        ValueError: a method, or the bare kernel, is unknown or cannot serve the problem.
        RuntimeError: a method is wrong (its error is over twice that of the kernel), or a rank failed.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; legal: {', '.join(METHODS)}")
        lacking = METHODS[name].needs(problem, ranks)
        if lacking is not None:
            raise ValueError(f"method {name} needs {lacking}")
    bare_kernel(problem)  # here, where its refusal is one line
    kernel_alone, burst_alone = in_processes(1, _beside_kernel, "burst", problem, repeats)[0]
    return [
        kernel_alone,
        burst_alone,
        *(in_processes(ranks, _beside_kernel, name, problem, repeats)[0][1] for name in names),
    ]


def record_pass(
    problem: Problem, ranks: Ranks, name: str, config: BurstConfig, rates: Rates | None = None
) -> list[Event]:
    """What every rank did when in one pass, "forward", "query" or "kv", over gloo on this machine.

    rates: those by which the way is chosen; default those of a CPU.

    Raises:
        ValueError: the configuration cannot serve the problem.
        RuntimeError: a rank failed.
    """
    per_rank = in_processes(ranks.size, _record_pass, problem, ranks, name, config, rates)
    return [event for events in per_rank for event in events]


def _record_pass(
    rank: int,
    size: int,
    problem: Problem,
    ranks: Ranks,
    name: str,
    config: BurstConfig,
    rates: Rates | None,
) -> list[Event]:
    group = dist.group.WORLD
    assert group is not None
    topology = Topology.from_group(group, intra_size=ranks.intra, rates=rates)
    config = replace(config, backward="kv" if name == "forward" else name)
    deal = partial(shard, dim=1, rank=rank, size=size, layout=config.layout)
    q, k, v, dout = map(deal, problem.tensors())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(2):  # once to warm up: connections, buffers
        dist.barrier()
        with record(rank) as events:
            out = burst_attention(*inputs, topology=topology, mask=problem.seen, config=config)
        if name != "forward":
            assert isinstance(out, Tensor)
            dist.barrier()
            with record(rank) as events:
                out.backward(dout)
    return events


def _beside_kernel(rank: int, size: int, name: str, problem: Problem, repeats: int) -> tuple[Result, Result]:
    """The bare kernel on rank 0, and the method on all ranks; the same on every rank but for the ratio."""
    method = METHODS[name]
    group = dist.group.WORLD
    assert group is not None
    error = _gate(rank, size, method, problem, group)
    attend = method.build(problem, group)
    tensors = problem.tensors()
    local = [shard(x, 1, rank=rank, size=size, layout=method.layout) for x in tensors]
    alone = bare_kernel(problem)

    def step() -> None:
        q, k, v = (x.detach().requires_grad_() for x in local[:3])
        attend(q, k, v).backward(local[3])

    def bare() -> None:  # on one rank while the others wait asleep, so that it has a core to itself
        if rank == 0:
            alone(*tensors)

    ours, single = alternating([step, bare], repeats)
    cpu = torch.tensor(ours.cpu, dtype=torch.float64)
    wall = torch.tensor(ours.wall, dtype=torch.float64)
    dist.all_reduce(cpu)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    median = statistics.median
    ratio = median(a / b for a, b in zip(cpu.tolist(), single.cpu, strict=True))
    return (
        Result(
            "kernel", 1, median(single.cpu), median(single.wall), cpu_of_kernel=1.0, error=1.0
        ),  # the unit
        Result(name, size, median(cpu.tolist()), median(wall.tolist()), ratio, error),
    )


def _gate(rank: int, size: int, method: Method, problem: Problem, group: dist.ProcessGroup) -> float:
    """The worst error of out, dq, dk, dv as a multiple of the bare kernel's own; RuntimeError above 2."""
    unit = 2 * size
    short = problem.shortened(max(unit, min(problem.seq, GATE_TOKENS) // unit * unit))
    tensors = short.tensors()
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=method.layout) for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = method.build(short, group)(*inputs)
    out.backward(dout)
    bar, exact = bare_kernel(short)(*tensors), _exact(short)
    worst = 0.0
    for got, near, want in zip((out, *(x.grad for x in inputs)), bar, exact, strict=True):
        assert got is not None
        parts = [torch.empty_like(got, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, got.detach().contiguous(), group=group)
        whole = unshard(parts, 1, layout=method.layout)
        worst = max(worst, ((whole.double() - want).norm() / (near.double() - want).norm()).item())
    if not worst <= 2.0:
        raise RuntimeError(f"{method.name} is wrong: its error is {worst:.2f} times that of the kernel")
    return worst


def _exact(problem: Problem) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) in float64, by the definition."""
    q, k, v, dout = (x.double() for x in problem.tensors())
    at, how, plain = torch.arange(problem.seq), kernel.Scores(problem.head_dim**-0.5), reference.KERNEL
    seen = Seen.by(problem.seen.allows(at, at))
    out, lse = plain.forward(q, k, v, seen, how)
    x = kernel.RowGradients(dout, q, k, v, None, lse, row_delta(dout, out))
    return out, *plain.backward(x, seen, how)


@dataclass
class Clock:
    """Seconds of each counted round."""

    cpu: list[float]
    wall: list[float]


def alternating(functions: Sequence[Callable[[], object]], repeats: int) -> list[Clock]:
    """Time the functions in turn, so that all see the same machine. The first round is not counted."""
    clocks = [Clock([], []) for _ in functions]
    for repeat in range(-1, repeats):
        for function, clock in zip(functions, clocks, strict=True):
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            function()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if repeat >= 0:
                clock.cpu.append(cpu)
                clock.wall.append(wall)
    return clocks


def in_processes(size: int, function: Callable[..., Any], *args: Any, keep_freed: bool = True) -> list[Any]:
    """function(rank, size, *args) on `size` gloo ranks of this machine, one thread each.

    keep_freed: see `keep_freed_memory`; not where memory is what is measured.
    """
    context = fresh_processes()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, mp_context=context) as pool:
        store = f"{folder}/store"
        ranks = [pool.submit(_rank, rank, size, store, keep_freed, function, args) for rank in range(size)]
        return [rank.result() for rank in ranks]


def fresh_processes() -> BaseContext:
    """Processes in which nothing ran but imports: those are made once, where the system can fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["burst_mcore.bench.run", "burst_mcore.bench.head"])
    return context


def _rank(
    rank: int,
    size: int,
    store: str,
    keep_freed: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    if keep_freed:
        keep_freed_memory()
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))  # type: ignore[attr-defined]
    try:
        return function(rank, size, *args)
    finally:
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Freed memory stays in the process, as in torch's allocator for GPUs, for whatever is measured in it.

    Otherwise glibc returns large tensors to the kernel and gets them back page by page, which on virtual
    machines takes about 10 us a page: up to a sixth of a short attention call, and nothing that is compared.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            for parameter, value in (
                (-4, 0),
                (-1, 2**31 - 1),
                (-2, 2**27),
            ):  # MMAP_MAX, TRIM_THRESHOLD, TOP_PAD
                mallopt(parameter, value)


def touch_memory(size: int) -> None:
    """Take so many bytes from the system and free them: with `keep_freed_memory` they stay in the process.

    Otherwise the heap takes new pages for as long as its blocks lie elsewhere in each call. At most 1.75 GiB,
    since glibc gives back what is 2 GiB and more.
    """
    torch.empty(min(size, 7 * 2**28), dtype=torch.uint8).fill_(0)
