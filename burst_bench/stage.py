"""The work of one process on a case: gate every method, then time methods and units in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from burst_bench.clock import Samples, interleave, over_ranks
from burst_bench.core import Case, Method, Stage, Trial, World, first_line
from burst_bench.launch import keep_freed_memory, touch_memory


@dataclass(frozen=True)
class Work:
    """What a set of processes measures."""

    case: Case
    methods: Sequence[Method]
    rounds: int
    device: str = "cpu"
    beside: Method | None = None
    """Timed in turn with the only method."""


@dataclass
class Outcome:
    """What a set of processes measured."""

    samples: Samples = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Why methods were not timed."""


def measure(rank: int, size: int, work: Work) -> Outcome:
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
        if not case.cold:
            keep_freed_memory()
            touch_memory(stage.room)
        beside = {} if work.beside is None else {work.beside.name: stage.trial(work.beside)}
        running = {**stage.units, **beside, **trials}
        times = interleave(running, world, work.rounds, cold=case.cold, clearly=case.clearly)
        outcome.samples |= _under(work.methods[0].name, times) if case.beside else times
    return outcome


def _under(method: str, times: Samples) -> Samples:
    """Figures of a method that ran alone: those of units are its own, too, with the unit's name before."""
    return {
        (method, meter if name == method else f"{name} {meter}"): samples
        for (name, meter), samples in times.items()
    }


def _gated(
    stage: Stage, method: Method, world: World
) -> tuple[Trial | None, Mapping[str, float], str | None]:
    """Return the method's trial, its figures before it is timed, and the reason not to time it."""
    trial, meters, reason = None, dict[str, float](), None
    try:
        trial = stage.trial(method)
        if trial.warm is not None:
            trial.warm()
        meters = {**trial.memory(), **trial.check()}
    except Exception as error:  # whatever a method raises is a result of the measurement
        reason = first_line(error)
    reason = _agreed(reason, world)
    if trial is None or reason is not None:
        return None, {}, reason
    meters = over_ranks(meters, world)
    return trial, meters, wrong(meters, trial.bound)


def wrong(meters: Mapping[str, float], bound: float) -> str | None:
    """Return the name of an error above the bound, or not a number; None if all are small."""
    for meter, value in meters.items():
        if meter.endswith("error") and not value <= bound:
            return f"wrong: its {meter} is {value:.3g}, which may be {bound:.3g}"
    return None


def _agreed(reason: str | None, world: World) -> str | None:
    """Return the first reason that any rank has."""
    if world.size == 1:
        return reason
    reasons: list[str | None] = [None] * world.size
    dist.all_gather_object(reasons, reason)
    return next((text for text in reasons if text is not None), None)
