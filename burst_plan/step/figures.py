"""The figures of a predicted step: tokens a second, the errors of such predictions, MFU, memory, timeline."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.rates import Rates
from burst_plan.machines import Machine
from burst_plan.step.attention import LAYOUTS, UNSCATTERED, AttentionTime, again, attention, keys
from burst_plan.step.memory import RESERVED, shard_of, stack, total
from burst_plan.step.model import Model
from burst_plan.step.plan import Plan
from burst_plan.step.time import Times, times


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster: its ranks, their rates, and its GPU. A kernel above the peak raises ValueError."""

    ranks: Ranks
    rates: Rates
    peak: float
    """FLOPs a second of products in 16 bits."""
    memory: float
    """Bytes of a GPU."""
    name: str = ""

    def __post_init__(self) -> None:
        if self.rates.compute > self.peak:
            raise ValueError(
                f"the rates have a kernel of {short(self.rates.compute / 1e12, 4)} TFLOP/s, more than the "
                f"peak of {self.name}, {short(self.peak / 1e12, 4)}: name the machine that was measured"
            )

    @classmethod
    def of(cls, machine: Machine, ranks: Ranks, name: str, rates: Rates | None = None) -> Cluster:
        """Return a cluster of a machine; rates: instead of the machine's."""
        peak, rates = machine.tflops * 1e12, rates or machine.rates
        return cls(ranks=ranks, rates=rates, peak=peak, memory=machine.memory, name=name)

    @property
    def usable(self) -> float:
        """Bytes that tensors may take."""
        return self.memory - RESERVED


TABLE = "errors.json"
"""The ranges of errors on the public runs of benchmarks/public/training.json: `make tables` writes them."""
KINDS = ("one GPU", "dense FSDP", "TP or PP", "experts", "long context")
"""Kinds of plans, whose errors have different causes: see `kind_of`."""


class Errors(NamedTuple):
    """The errors of predicted speeds: predicted over measured, less 1."""

    kind: str
    runs: int = 0
    """Public runs of the kind. A run whose source leaves a setting open is predicted for each assumption."""
    low: float = 0.0
    high: float = 0.0

    @property
    def range(self) -> str:
        """The range, for a column of a table."""
        return f"{self.low:+.0%} to {self.high:+.0%}" if self.runs else "unknown"

    def __str__(self) -> str:
        if not self.runs:
            return f"predicted; no public run of this kind ({self.kind}) was compared"
        runs = f"{self.runs} public run{'s' * (self.runs > 1)}"
        return (
            f"predicted; on {runs} of this kind ({self.kind}) predictions were {self.range} off the measured "
            "speed"
        )


def kind_of(plan: Plan, model: Model) -> str:
    """Return the kind of a plan, one of `KINDS`: by experts first, then by parallelism."""
    if model.experts:
        return "experts"
    if plan.tp > 1 or plan.pp > 1:
        return "TP or PP"
    if plan.cp > 1:
        return "long context"
    return "dense FSDP" if plan.dp > 1 else "one GPU"


def errors_of(plan: Plan, model: Model) -> Errors:
    """Return the errors of predicted speeds of the same kind, from the committed table."""
    kind = kind_of(plan, model)
    return _table().get(kind, Errors(kind))


@cache
def _table() -> dict[str, Errors]:
    text = files("burst_plan.step").joinpath(TABLE).read_text(encoding="utf-8")
    return {row["kind"]: Errors(**row) for row in json.loads(text)}


@dataclass(frozen=True)
class PredictedStep:
    """A predicted training step."""

    model: Model
    plan: Plan
    seq: int
    place: Cluster
    attention: AttentionTime
    mask: str = "causal"
    """The mask of all layers, as an expression."""

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a rank, by kind."""
        runs = self.attention
        how = runs.direction, runs.nodes, runs.head_parallel, runs.layout
        return stack(self.model, self.plan, self.seq, *how)

    @cached_property
    def times(self) -> Times:
        plan, place = self.plan, self.place
        share = 0.0 if plan.recompute == "none" else again(self.mask, self.seq, plan.kept)
        return times(
            self.model, plan, self.seq, place.ranks, place.rates, place.peak, self.attention, again=share
        )

    @property
    def seconds(self) -> float:
        return self.times.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and GPU."""
        return self.seq * self.plan.dp * self.plan.micro / self.seconds / self.plan.gpus

    @property
    def mfu(self) -> float:
        """Share of the peak: FLOPs of the model under its mask, without recomputed ones."""
        return self.model.flops(keys(self.mask, self.seq)) * self.tokens_per_second / self.place.peak

    @property
    def errors(self) -> Errors:
        """The errors of predicted speeds of this kind."""
        return errors_of(self.plan, self.model)

    @property
    def fits(self) -> bool:
        return total(self.memory) <= self.place.usable

    def timeline(self) -> list[dict[str, Any]]:
        """Return the parts of a step one after another: name, kind, begin and end in seconds."""
        events, now = [], 0.0
        parts = {"compute": self.times.compute, "exposed": self.times.exposed}
        for kind, seconds in parts.items():
            for name, length in seconds.items():
                if length:
                    events.append({"name": name, "kind": kind, "begin": now, "end": now + length})
                    now += length
        return events

    def as_json(self) -> dict[str, Any]:
        """Return all that is predicted, in seconds and bytes."""
        return {
            "plan": asdict(self.plan),
            "words": str(self.plan),
            "attention": asdict(self.attention) | {"exposed": self.attention.exposed},
            "memory": self.memory,
            "memory_total": total(self.memory),
            "fits": self.fits,
            "seconds": self.seconds,
            "compute": dict(self.times.compute),
            "exposed": dict(self.times.exposed),
            "tokens_per_second_gpu": self.tokens_per_second,
            "mfu": self.mfu,
            "errors": self.errors._asdict() | {"range": self.errors.range, "words": str(self.errors)},
            "timeline": self.timeline(),
        }


def short(number: float, digits: int = 3) -> str:
    """Return a number to so many digits, or all digits before its point: large ones have no exponent."""
    return f"{number:.{digits}g}" if abs(number) < 10**digits - 0.5 else f"{number:.0f}"


def step(model: Model, plan: Plan, seq: int, place: Cluster, mask: str = "causal") -> PredictedStep:
    """Return the prediction of a step whose attention runs the fastest schedule.

    Raises:
        ValueError: as `attention`.
    """
    ranks, layouts = plan.ring(place.ranks), UNSCATTERED if model.mixer.layers else LAYOUTS
    layouts = layouts if model.attending else UNSCATTERED[1:]  # has the shorter scan; balance is not needed
    runs = attention(shard_of(model, plan, seq), seq, ranks, place.rates, mask, layouts=layouts)
    return PredictedStep(model, plan, seq, place, runs, mask)
