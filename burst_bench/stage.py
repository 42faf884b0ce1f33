"""The work of one process on a case: gate every method, then time methods and units in turn.

Steps run in turn, so that all are timed on the same state of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from burst_bench.core import Case, Method, Stage, TimedStep, Trial, World, first_line
from burst_bench.launch import keep_freed_memory, touch_memory


@dataclass(frozen=True)
class StageWork:
    """The work of a set of processes."""

    case: Case
    methods: Sequence[Method]
    rounds: int
    device: str = "cpu"
    beside: Method | None = None
    """The unit that is timed in turn with the only method."""


@dataclass
class Outcome:
    """The measurements of a set of processes."""

    samples: Samples = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons why methods were not timed."""


def measure(rank: int, size: int, work: StageWork) -> Outcome:
    """Return the outcome, which is the same on every rank."""
    case, world = work.case, World(rank, size, work.device)
    torch.set_num_threads(case.threads)
    stage, trials = case.prepare(world), dict[str, Trial]()
    outcome = Outcome({figure: [value] for figure, value in stage.facts.items()})
    for method in work.methods:
        trial, meters, reason = _gated(stage, method, world)
        outcome.samples |= {(method.name, meter): [value] for meter, value in meters.items()}
        if reason is not None:
            outcome.refused[method.name] = reason
        elif trial is not None:
            trials[method.name] = trial
    if trials:
        keep_freed_memory()
        touch_memory(stage.room)
        beside = {} if work.beside is None else {work.beside.name: stage.trial(work.beside)}
        running = {**stage.units, **beside, **trials}
        times = interleave(running, world, work.rounds, clearly=case.clearly)
        owner = work.methods[0].name
        for (name, meter), samples in times.items():
            # In a method's own processes a unit's figures belong to the method, with the unit as prefix.
            label = (name, meter) if not case.beside or name == owner else (owner, f"{name} {meter}")
            outcome.samples[label] = samples
    return outcome


def _gated(
    stage: Stage, method: Method, world: World
) -> tuple[Trial | None, Mapping[str, float], str | None]:
    """Return the method's trial, its figures before it is timed, and the reason not to time it."""
    trial, meters, reason = None, dict[str, float](), None
    try:
        trial = stage.trial(method)
        if trial.warm is not None:
            trial.warm()
        meters = {**trial.check()}
    except Exception as error:  # any error of a method is a result
        reason = first_line(error)
    reasons: list[str | None] = [None] * world.size
    dist.all_gather_object(reasons, reason)
    reason = next((text for text in reasons if text is not None), None)  # the first of any rank
    if trial is None or reason is not None:
        return None, {}, reason
    meters = over_ranks(meters, world)
    return trial, meters, wrong(meters, trial.bound)


def wrong(meters: Mapping[str, float], bound: float) -> str | None:
    """Return the name of an error that is above the bound, or NaN; None if all are small."""
    for meter, value in meters.items():
        if meter.endswith("error") and not value <= bound:
            return f"wrong: its {meter} is {value:.3g}, which may be {bound:.3g}"
    return None


HEAD_START = 10**8
"""Clock cycles, about 50 ms, that a GPU sleeps so that the host gets ahead of it."""
SUMMED = ("cpu", "recomputing")
"""Meters that are summed over ranks; of others the largest counts."""
Samples = dict[tuple[str, str], list[float]]
"""Samples by (method, meter)."""


def interleave(trials: Mapping[str, Trial], world: World, rounds: int, *, clearly: float) -> Samples:
    """Time the steps of all trials in turn, forth and back, after one round that is not counted.

    A step whose first round took more than `clearly` times the fastest's has only that round.
    """
    steps = [(name, part, trial) for name, trial in trials.items() for part in trial.steps]
    samples: Samples = {}

    def note(name: str, part: str, sample: Mapping[str, float]) -> None:
        for meter, value in sample.items():
            samples.setdefault((name, f"{part} {meter}".strip()), []).append(value)

    first = [one_round(trial, part, world) for _, part, trial in steps]
    slow = clearly * min((sample["wall"] for sample in first), default=0.0)
    for (name, part, _), sample in zip(steps, first, strict=True):
        if sample["wall"] > slow:
            note(name, part, sample)
    steps = [step for step, sample in zip(steps, first, strict=True) if sample["wall"] <= slow]
    for index in range(rounds):
        for name, part, trial in steps[:: -1 if index % 2 else 1]:
            note(name, part, one_round(trial, part, world))
    return samples


def one_round(trial: Trial, part: str, world: World) -> dict[str, float]:
    """Return all meters of one step, over all ranks."""
    if world.size > 1:
        dist.barrier()
    clock = _cuda if world.device == "cuda" else _cpu
    return over_ranks(clock(trial.steps[part], trial.ahead), world)


def _cpu(step: TimedStep, ahead: bool) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    more = step()
    seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {**seconds, **(more if isinstance(more, dict) else {})}


def _cuda(step: TimedStep, ahead: bool) -> dict[str, float]:
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
    """Return each meter's sum over ranks, or its maximum."""
    if world.size == 1:
        return dict(sample)
    values = torch.tensor(list(sample.values()), dtype=torch.float64)
    sums = values.clone()
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return {
        meter: (total if meter.split()[-1] in SUMMED else maximum)
        for meter, maximum, total in zip(sample, values.tolist(), sums.tolist(), strict=True)
    }
