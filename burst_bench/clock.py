"""Clocks: seconds of steps that run in turn, so that all see the same machine."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from burst_bench.core import Step, Trial, World
from burst_bench.memory import peak_meter

HEAD_START = 10**8
"""Clock cycles, about 50 ms, that a GPU sleeps so that the host gets ahead of it."""
SUMMED = ("cpu", "recomputing")
"""Meters whose figure is the sum over ranks; that of the others is the largest."""
Samples = dict[tuple[str, str], list[float]]
"""By (method, meter)."""


def interleave(
    trials: Mapping[str, Trial], world: World, rounds: int, *, cold: bool = False, clearly: float
) -> Samples:
    """Time the steps of all trials in turn, forth and back, after one round that is not counted.

    Args:
        trials: By name of the method or unit.
        world: The processes that run the same steps at the same time.
        rounds: Counted rounds.
        cold: Count the first round, and the peak memory of every step.
        clearly: A step whose first round took more than this many times the fastest's has that round alone.

    Returns:
        Samples by (method, meter): the sum over ranks of CPU seconds, the largest of everything else.
    """
    steps = [(name, part, trial) for name, trial in trials.items() for part in trial.steps]
    samples: Samples = {}

    def note(name: str, part: str, sample: Mapping[str, float]) -> None:
        for meter, value in sample.items():
            samples.setdefault((name, f"{part} {meter}".strip()), []).append(value)

    if not cold:
        first = [one_round(trial, part, world) for _, part, trial in steps]
        slow = clearly * min((sample["wall"] for sample in first), default=0.0)
        for (name, part, _), sample in zip(steps, first, strict=True):
            if sample["wall"] > slow:
                note(name, part, sample)
        steps = [step for step, sample in zip(steps, first, strict=True) if sample["wall"] <= slow]
    for index in range(rounds):
        for name, part, trial in steps[:: -1 if index % 2 else 1]:
            note(name, part, one_round(trial, part, world, memory=cold))
    return samples


def one_round(trial: Trial, part: str, world: World, *, memory: bool = False) -> dict[str, float]:
    """Return all meters of one step, over all ranks; with `memory` the peak as well."""
    if world.size > 1:
        dist.barrier()
    clock, sample = _cuda if world.device == "cuda" else _cpu, dict[str, float]()

    def run() -> None:
        sample.update(clock(trial.steps[part], trial.ahead))

    if memory:
        sample |= peak_meter(run, world.device)
    else:
        run()
    return over_ranks(sample, world)


def _cpu(step: Step, ahead: bool) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    more = step()
    seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {**seconds, **(more if isinstance(more, dict) else {})}


def _cuda(step: Step, ahead: bool) -> dict[str, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(HEAD_START)
    start.record()
    more = step()
    end.record()
    end.synchronize()
    return {"wall": start.elapsed_time(end) / 1e3, **(more if isinstance(more, dict) else {})}


def over_ranks(sample: Mapping[str, float], world: World) -> dict[str, float]:
    """Return each meter's sum over ranks, or the largest value."""
    if world.size == 1:
        return dict(sample)
    values = torch.tensor(list(sample.values()), dtype=torch.float64)
    sums = values.clone()
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return {
        meter: (total if meter.split()[-1] in SUMMED else most)
        for meter, most, total in zip(sample, values.tolist(), sums.tolist(), strict=True)
    }
