"""Times of each rank's actions in a pass: recorded in any run, and for `burst-mcore draw --measure`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from burst_bench.core import World
from burst_bench.launch import in_processes, keep_freed_memory
from burst_bench.methods.attention import ShardedAttention, attended
from burst_mcore import BurstConfig, Topology
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule import actions as does
from burst_mcore.attention.schedule.actions import RECORDERS, Action, Channel, Pass
from burst_mcore.rates import Rates
from burst_plan.explain.problem import LayerProblem
from burst_plan.simulate.trace import Event, lane


@dataclass
class Recording:
    """A recorder of the times of one rank's actions, on the host.

    A message's end is the end of its wait: it arrived then, or earlier.
    """

    rank: int = 0
    events: list[Event] = field(default_factory=list)
    _begin: float = field(default_factory=time.perf_counter)
    _under_way: dict[Channel, list[tuple[str, float]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Record the time of an action, and of the messages that it waits for."""
        before = time.perf_counter()
        yield
        if isinstance(action, does.Wait):
            for label, posted in self._under_way.pop(action.channel):
                self._note(lane(action.channel), label, posted)
        elif isinstance(action, (does.Compute, does.Accumulate, does.Add, does.Pack, does.Unpack)):
            self._note("compute", str(action), before)

    def posted(self, channel: Channel, actions: Sequence[Action]) -> None:
        """Record the start of the messages of a ring step."""
        now = time.perf_counter()
        starts = [(str(action), now) for action in actions if isinstance(action, does.Recv)]
        self._under_way.setdefault(channel, []).extend(starts)

    def _note(self, where: str, label: str, began: float) -> None:
        start, end = began - self._begin, time.perf_counter() - self._begin
        self.events.append(Event(self.rank, where, label, start, start, end))


@contextlib.contextmanager
def record(rank: int = 0) -> Iterator[list[Event]]:
    """Record the passes that run inside; rank: the rank of the events.

    Every rank records its events: gather the lists and give them to `burst_plan.explain.chrome_trace`.
    """
    recording = Recording(rank)
    RECORDERS.append(recording)
    try:
        yield recording.events
    finally:
        RECORDERS.remove(recording)


def trace_pass(
    problem: LayerProblem, ranks: Ranks, pass_: Pass, config: BurstConfig, rates: Rates | None = None
) -> list[Event]:
    """Return the events of every rank in one pass, over gloo on this machine.

    The candidate is chosen by `rates`, by default a CPU's. Raises a ValueError if the configuration does not
    support the problem, a RuntimeError if a rank failed.
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
    *inputs, dout = map(ShardedAttention(config.layout, world, attend).shard, problem.tensors())
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
