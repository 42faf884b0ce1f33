"""Reviews the plan of a user's configuration: its speed, its memory, and faster plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from burst_mcore.attention.choose import AS_FAST
from burst_mcore.config import BurstConfig
from burst_plan.doctor.configured import MEGATRONS_OWN, NotPredictedError
from burst_plan.step.advice import advice, notes, of_windows
from burst_plan.step.attention import attention
from burst_plan.step.figures import Cluster, PredictedStep, short
from burst_plan.step.memory import shard_of, total
from burst_plan.step.model import Model
from burst_plan.step.plan import Plan, why_not
from burst_plan.step.search import lengths, search, waits


def review(step: PredictedStep, config: BurstConfig, unknown: str | None = None) -> Iterator[str]:
    """Yield lines on a configured step: its speed, its memory, and the best plan of the same framework.

    unknown: why its speed is not predicted; then only memory is reported.
    """
    if unknown is not None:
        yield memory(step)
        yield f"step: not predicted: {unknown}"
        return
    yield (
        f"step (predicted): {step.plan}: {short(step.seconds)} s, "
        f"{short(step.tokens_per_second, 4)} tokens/s/GPU, MFU {step.mfu:.0%}; {waits(step)}"
    )
    yield f"speed: {step.errors}"
    megatrons = step.plan.framework == "megatron" and config == MEGATRONS_OWN
    yield f"attention: {step.attention}" + " (taken for Megatron's own, p2p)" * megatrons
    yield memory(step) + ("" if step.fits else f"; {_longest(step)}")
    yield from (f"note: {note}" for note in of_windows(step))
    yield from _better(step)


def memory(step: PredictedStep) -> str:
    """Return a rank's memory by kind, and whether it fits a GPU of known memory."""
    place, parts = step.place, ", ".join(f"{name} {short(n / 1e9)}" for name, n in step.memory.items())
    limit = (
        f"; there are {short(place.memory / 1e9)} GB, {short(place.usable / 1e9)} of them for tensors: "
        f"{'it fits' if step.fits else 'it does not fit'}"
    )
    return (
        f"memory of a rank: about {short(total(step.memory) / 1e9)} GB ({parts}), for "
        f"{short(step.model.parameters / 1e9)} billion parameters"
    ) + limit * math.isfinite(place.memory)


def _longest(step: PredictedStep) -> str:
    """Return a note on the longest sequence that fits under the same plan."""
    for seq, _ in lengths(step.model, step.place, [step.plan]).values():
        return f"{seq} tokens would"
    return "nor would a shorter sequence"


def _better(step: PredictedStep) -> Iterator[str]:
    """Yield the settings of a plan that is faster or fits, if there is one."""
    plan, place = step.plan, step.place
    answer = search(
        step.model, step.seq, plan.dp * plan.micro, place, mask=step.mask, frameworks=(plan.framework,)
    )
    best = answer.chosen
    if best is None:
        yield f"instead: no plan of {plan.framework} over {place.ranks.size} ranks fits {step.seq} tokens"
    elif step.fits and step.seconds <= AS_FAST * best.seconds:
        others = f"no plan of {plan.framework} over {place.ranks.size} ranks"
        yield f"faster: {others} is more than {AS_FAST - 1:.0%} faster"
    else:
        gain = f"takes {1 - best.seconds / step.seconds:.0%} less time" if step.fits else "fits"
        yield f"{'faster' if step.fits else 'instead'}: {best.plan} {gain}, {short(best.seconds)} s; write"
        yield advice(best)
        yield from (f"note: {note}" for note in notes(best) if note not in of_windows(step))


def predicted(
    model: Model, plan: Plan, config: BurstConfig, seq: int, place: Cluster,
    mask: str = "causal", batch: int = 1,
) -> PredictedStep:  # fmt: skip
    """Return the step of a configured plan.

    Args:
        config: the settings of its attention.
        batch: sequences of a micro-batch: they take the bytes of one sequence of their total length.

    Raises:
        NotPredictedError: the planner does not support such a plan.
    """
    reason = why_not(plan, model, seq, place.ranks)
    if reason is not None:
        raise NotPredictedError(reason)
    try:
        shard = replace(shard_of(model, plan, seq), batch=batch, grad_dtype=config.grad_dtype)
        runs = attention(shard, seq, plan.ring(place.ranks), place.rates, mask, config)
    except ValueError as error:
        raise NotPredictedError(str(error)) from None
    return PredictedStep(model, plan, batch * seq, place, runs, mask)
