"""The times of what each rank does in a pass: recorded in any run, and for `burst-mcore draw --measure`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from burst_bench.core import World
from burst_bench.launch import in_processes, keep_freed_memory
from burst_bench.methods.attention import attended
from burst_bench.methods.sharded import dealt
from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import (
    Accumulate,
    Action,
    Add,
    Channel,
    Compute,
    Pack,
    Pass,
    Recv,
    Unpack,
    Wait,
)
from burst_mcore.attention.schedule.trace import RECORDERS, Event, lane
from burst_mcore.config import BurstConfig
from burst_mcore.rates import Rates
from burst_plan.explain.problem import LayerProblem


@dataclass
class Recording:
    """A recorder of the times of one rank's actions; if `on_cuda`, of times on the current stream.

    A message's end is the time when its wait was over: it arrived then, or earlier.
    """

    rank: int = 0
    on_cuda: bool = False
    events: list[Event] = field(default_factory=list)
    _marks: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    _under_way: dict[Channel, list[tuple[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin = self._now()

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Take the time of an action, and of the messages that it waits for."""
        before = self._now()
        yield
        after = self._now()
        if isinstance(action, Wait):
            for label, posted in self._under_way.pop(action.channel):
                self._marks.append((lane(action.channel), label, posted, after))
        elif isinstance(action, (Compute, Accumulate, Add, Pack, Unpack)):
            self._marks.append(("compute", str(action), before, after))

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Note when the messages of a hop started."""
        now = self._now()
        started = [(str(action), now) for action in actions if isinstance(action, Recv)]
        self._under_way.setdefault(channel, []).extend(started)

    def finish(self) -> None:
        """Turn the marks into events; on CUDA this waits for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()
        for where, label, start, end in self._marks:
            started = self._since(start)
            self.events.append(Event(self.rank, where, label, started, started, self._since(end)))
        self._marks = []

    def _now(self) -> Any:
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _since(self, mark: Any) -> float:
        seconds: float = (
            mark - self._begin if isinstance(mark, float) else self._begin.elapsed_time(mark) / 1e3
        )
        return seconds


@contextlib.contextmanager
def record(rank: int = 0, *, on_cuda: bool = False) -> Iterator[list[Event]]:
    """Record the passes that run inside; the events are there when it ends.

    Every rank records its own: gather the lists and give them to `burst_plan.explain.chrome_trace`.

    Args:
        rank: the rank that the events are marked with.
        on_cuda: whether tensors are on CUDA. Times are then taken on the current stream, and the end of the
            context waits for the device.
    """
    recording = Recording(rank, on_cuda)
    RECORDERS.append(recording)
    try:
        yield recording.events
    finally:
        RECORDERS.remove(recording)
        recording.finish()


def trace_pass(
    problem: LayerProblem, ranks: Ranks, pass_: Pass, config: BurstConfig, rates: Rates | None = None
) -> list[Event]:
    """Return the events of every rank in one pass, over gloo on this machine.

    rates: those by which the way is chosen; default those of a CPU.

    Raises:
        ValueError: the configuration cannot serve the problem.
        RuntimeError: a rank failed.
    """
    config = replace(config, backward=Pass.KV if pass_ == Pass.FORWARD else pass_)
    per_rank = in_processes(ranks.size, _trace_pass, problem, ranks.intra, pass_, config, rates)
    return [event for events in per_rank for event in events]


def _trace_pass(
    rank: int,
    size: int,
    problem: LayerProblem,
    intra: int,
    pass_: Pass,
    config: BurstConfig,
    rates: Rates | None,
) -> list[Event]:
    keep_freed_memory()
    world = World(rank, size)
    topology = Topology.from_group(world.group, intra_size=intra, rates=rates)
    attend = partial(attended, topology=topology, mask=problem.seen, config=config)
    *inputs, dout = map(dealt(config.layout, world, attend).shard, problem.tensors())
    for x in inputs:
        x.requires_grad_()
    for _ in range(2):  # once to warm up: connections, buffers
        dist.barrier()
        with record(rank) as events:
            out = attend(*inputs)
        if pass_ != Pass.FORWARD:
            dist.barrier()
            with record(rank) as events:
                out.backward(dout)
    return events
