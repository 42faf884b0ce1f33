"""Published figures of whole training steps, each predicted by the step model for its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from burst_bench.published.methods import FITTED, METHODS, seconds_of
from burst_bench.published.methods import MethodPlan as AttentionPlan
from burst_bench.published.rows import Row
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.actions import Pass
from burst_plan.machines import MACHINES, Machine
from burst_plan.step.attention import AttentionTime
from burst_plan.step.figures import Cluster, PredictedStep
from burst_plan.step.figures import step as step_of
from burst_plan.step.memory import longest, total
from burst_plan.step.model import Model
from burst_plan.step.plan import Plan, why_not

OUT_OF_MEMORY = "out of memory"
FLAT = "flat burst"
"""The method "burst" on one ring of all ranks."""
_NEEDED = ("seq", "gpus_per_node", "hardware", "value", "gpus", "metric")
"""Fields of a row of training, without its model and its plan."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A measured training run."""

    model: Model
    plan: Plan
    seq: int
    per_node: int
    hardware: str
    method: str = ""
    """The method of attention, a name in METHODS of `published.methods`, or `FLAT`; "": as `plan` chooses."""
    variant: str = ""
    """The variant of the method, as in `burst_bench.published.rows.Row`."""
    mask: str = "causal"
    """causal or full."""
    counted: float = 1.0
    """FLOPs that a source's MFU counts, as multiples of those of the model under its mask."""


def predicted(run: Training, machines: Mapping[str, Machine] = MACHINES) -> PredictedStep | str:
    """Return the step of a run, or the reason why it cannot run."""
    machine = machines[run.hardware]
    ranks = Ranks(run.plan.gpus, min(run.plan.gpus, run.per_node))
    reason = why_not(run.plan, run.model, run.seq, ranks)
    if reason is not None:
        return reason
    place = Cluster(
        ranks=ranks, rates=machine.rates, peak=machine.tflops * 1e12, memory=machine.memory, name=run.hardware
    )
    if not run.method:
        return step_of(run.model, run.plan, run.seq, place, run.mask)
    row = _row(run, ranks)
    plan = AttentionPlan(direction=Pass.QUERY) if run.method == FLAT else METHODS[run.method](row)
    if isinstance(plan, str):
        return plan
    forward = _seconds(replace(row, passes="fwd"), plan, machine.rates_by(FITTED))
    backward = _seconds(replace(row, passes="bwd"), plan, machine.rates_by(FITTED))
    runs = AttentionTime(
        forward=forward, backward=backward, head_parallel=plan.heads, direction=plan.direction.value,
        kernel=forward + backward,  # the exposed part of the sum is not separated here
        nodes=row.ranks.size // row.ranks.intra if plan.double else 1,
    )  # fmt: skip
    return PredictedStep(run.model, run.plan, run.seq, place, runs)


_seconds = lru_cache(maxsize=256)(seconds_of)


def _row(run: Training, ranks: Ranks) -> Row:
    model, ring = run.model, run.plan.ring(ranks)
    return Row(
        hardware=run.hardware, gpus=ring.size, gpus_per_node=ring.intra, heads=model.heads // run.plan.tp,
        kv_heads=max(1, model.kv_heads // run.plan.tp), head_dim=model.head_dim, batch=1, seq=run.seq,
        mask=run.mask, passes="fwd", method=run.method, variant=run.variant, tflops=1.0,
    )  # fmt: skip


def value_of(metric: str, step: PredictedStep, counted: float = 1.0) -> float | None:
    """Return a figure of a step in the unit of its source; None for a metric that no step has."""
    figures = {
        "tgs": step.tokens_per_second,
        "tokens per second per GPU": step.tokens_per_second,
        "tokens per second, all GPUs": step.tokens_per_second * step.plan.gpus,
        "mem_gb": total(step.memory) / 1e9,
        "model TFLOP/s per GPU": step.mfu * step.place.peak / 1e12,
        "MFU": 100 * step.mfu * counted,
    }
    return figures.get(metric)


def figure(run: Training, metric: str, machines: Mapping[str, Machine]) -> float | str:
    """Return a figure of a run, or the reason for no prediction."""
    step = predicted(run, machines)
    if isinstance(step, str):
        return step
    if metric == "longest sequence":
        return longest(lambda seq: replace(step, seq=seq).fits, unit=1024 * step.plan.gpus)
    if not step.fits:
        return f"{OUT_OF_MEMORY}: {total(step.memory) / 1e9:.0f} of {step.place.usable / 1e9:.0f} GB"
    value = value_of(metric, step, run.counted)
    return f"no step has a {metric}" if value is None else value


def of_row(entries: Mapping[str, Any]) -> Training | str:
    """Return the run of a row of training, or the reason why it is not modelled.

    A row gives its model and its plan in the fields of `Model` and `Plan`, and may give others of `Training`.
    Raises a ValueError for a row without the fields of training, or with illegal sizes or plan.
    """
    try:
        model, plan = Model(**entries["model"]), Plan(**entries["plan"])
        seq, per_node, hardware, value, *_ = (entries[name] for name in _NEEDED)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a row of training lacks a field: {type(error).__name__} {error}") from None
    optional = {name: entries[name] for name in ("method", "variant", "mask", "counted") if name in entries}
    if value is not None and (not isinstance(value, (int, float)) or not value > 0):
        raise ValueError(f"value of a row of training must be a positive number, or null, got {value!r}")
    if optional.get("mask", "causal") not in ("causal", "full"):
        raise ValueError(f"mask of a row of training must be causal or full, got {optional['mask']!r}")
    if "mixer" in entries["model"]:
        raise ValueError("mixer in the model of a row of training: rows of hybrid models are not read")
    if hardware not in MACHINES:
        return f"unknown hardware {hardware}"
    if optional.get("method", "") not in ("", FLAT, *METHODS):
        return f"unknown method {optional['method']}"
    return Training(model=model, plan=plan, seq=seq, per_node=per_node, hardware=hardware, **optional)
