"""Reviews a way that a user has configured: how fast it is, whether it fits, and what would be faster."""

from __future__ import annotations

from collections.abc import Iterator

from burst_mcore.config import BurstConfig
from burst_plan.doctor.configured import MEGATRONS_OWN, NotPredictedError
from burst_plan.step.advice import advice, notes, of_windows
from burst_plan.step.attention import attention
from burst_plan.step.figures import Place, Step, short
from burst_plan.step.memory import shard_of, total
from burst_plan.step.model import Model
from burst_plan.step.search import AS_FAST, lengths, search, waits
from burst_plan.step.way import Way, why_not


def review(step: Step, config: BurstConfig) -> Iterator[str]:
    """Yield lines on a configured step: its speed, its memory, and the best way of the same framework."""
    place = step.place
    yield (
        f"step (predicted): {step.way}: {short(step.seconds)} s, "
        f"{short(step.tokens_per_second, 4)} tokens/s/GPU, MFU {step.mfu:.0%}; {waits(step)}"
    )
    yield f"speed: {step.errors}"
    own = step.way.framework == "megatron" and config == MEGATRONS_OWN
    yield f"attention: {step.attention}" + " (taken for Megatron's own, p2p)" * own
    parts = ", ".join(f"{name} {short(size / 1e9)}" for name, size in step.memory.items())
    fits = "it fits" if step.fits else f"it does not fit; {_longest(step)}"
    yield (
        f"memory of a rank: about {short(total(step.memory) / 1e9)} GB ({parts}), for "
        f"{short(step.model.parameters / 1e9)} billion parameters; there are {short(place.memory / 1e9)} GB, "
        f"{short(place.usable / 1e9)} of them for tensors: {fits}"
    )
    yield from (f"note: {note}" for note in of_windows(step))
    yield from _better(step)


def _longest(step: Step) -> str:
    """Say how long a sequence fits in the same way."""
    for seq, _ in lengths(step.model, step.place, [step.way]).values():
        return f"{seq} tokens would"
    return "nor would a shorter sequence"


def _better(step: Step) -> Iterator[str]:
    """Yield what to write instead, where that is faster or fits."""
    way, place = step.way, step.place
    answer = search(
        step.model, step.seq, way.dp * way.micro, place, mask=step.mask, frameworks=(way.framework,)
    )
    best = answer.chosen
    if best is None:
        yield f"instead: no way of {way.framework} over {place.ranks.size} ranks fits {step.seq} tokens"
    elif step.fits and step.seconds <= AS_FAST * best.seconds:
        yield f"faster: no way of {way.framework} over {place.ranks.size} ranks is more than 1 % faster"
    else:
        gain = f"takes {1 - best.seconds / step.seconds:.0%} less time" if step.fits else "fits"
        yield f"{'faster' if step.fits else 'instead'}: {best.way} {gain}, {short(best.seconds)} s; write"
        yield advice(best)
        yield from (f"note: {note}" for note in notes(best) if note not in of_windows(step))


def predicted(
    model: Model, way: Way, config: BurstConfig, seq: int, place: Place, mask: str = "causal"
) -> Step:
    """Return the step of a configured way; config: the settings of its attention.

    Raises:
        NotPredictedError: the planner does not know such a way.
    """
    reason = why_not(way, model, seq, place.ranks)
    if reason is not None:
        raise NotPredictedError(reason)
    try:
        runs = attention(shard_of(model, way, seq), seq, way.ring(place.ranks), place.rates, mask, config)
    except ValueError as error:
        raise NotPredictedError(str(error)) from None
    return Step(model, way, seq, place, runs, mask)
