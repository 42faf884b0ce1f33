"""Traces when each rank did what in one pass over gloo on this machine, for `burst-mcore draw --measure`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist

from burst_bench.core import World
from burst_bench.launch import in_processes, keep_freed_memory
from burst_bench.methods.attention import attended
from burst_bench.methods.sharded import dealt
from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.trace import Event, record
from burst_mcore.config import BurstConfig
from burst_mcore.rates import Rates
from burst_plan.explain.problem import Problem


def trace_pass(
    problem: Problem, ranks: Ranks, pass_: Pass, config: BurstConfig, rates: Rates | None = None
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
    rank: int, size: int, problem: Problem, intra: int, pass_: Pass, config: BurstConfig, rates: Rates | None
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
