"""The answer of `burst-mcore plan --model`: from options of a command line to a search, and then to text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from burst_mcore.rates import Rates
from burst_plan.explain.predict import cluster as parse
from burst_plan.machines import MACHINES
from burst_plan.step.advice import advice, notes
from burst_plan.step.attention import beside_rule
from burst_plan.step.figures import Cluster, PredictedStep, short
from burst_plan.step.memory import shard_of, total
from burst_plan.step.model import LARGEST, model_of
from burst_plan.step.plan import FRAMEWORKS
from burst_plan.step.recurrence import told
from burst_plan.step.search import Answer, kind, search
from burst_plan.tables import table
from burst_plan.words import mask_of, tokens

ALIGNED = (*["left"] * 3, *["right"] * 6)
"""Alignment of the columns in the table of plans, `_row`."""
MISSING = {"megatron": "these flags to your model's", "deepspeed": "your optimizer to this JSON"}
"""The text on settings to complete, by framework."""
LESS = ("exposed %", "attention", "off by", "MFU %", "s")
"""Columns that a narrow terminal leaves out, in this order."""


def planned(
    model: str,
    seq: str | None,
    cluster: str,
    batch: int | None,
    rates_file: Path | None,
    mask: str | None = None,
    gpu: str | None = None,
) -> Answer:
    """Return the search for command-line options; the default mask is the model's.

    Raises:
        ValueError: illegal or contradictory options.
    """
    sizes, pinned = model_of(model)
    length = length_of(seq, pinned.pop("seq", None))
    megatrons = pinned.pop("batch", None)
    if None not in (batch, megatrons) and batch != megatrons:
        raise ValueError(
            f"--batch {batch} contradicts --global-batch-size {megatrons} in the model's arguments"
        )
    batch = batch if batch is not None else megatrons or 1
    if not 1 <= batch <= LARGEST:
        raise ValueError(f"--batch must be at least 1 and at most {LARGEST}, got {batch}")
    mask = sizes.mask(length) if mask is None else " & ".join("".join(w.split()) for w in mask.split("&"))
    mask_of(mask, length)
    ranks, machine = parse(cluster, gpu)
    machine = machine or MACHINES["A800"]
    rates = None if rates_file is None else Rates.load(rates_file)
    place = Cluster.of(machine, ranks, f"{machine.name} {ranks.size // ranks.intra}x{ranks.intra}", rates)
    return search(sizes, length, batch, place, pinned, mask)


def length_of(seq: str | None, megatrons: int | None) -> int:
    """Return the tokens of a sequence; megatrons: the --seq-length of Megatron's arguments.

    Raises:
        ValueError: both are missing, or they contradict each other.
    """
    if seq is None and megatrons is None:
        raise ValueError("give --seq: the tokens of a sequence, such as 1M")
    length = tokens(seq) if seq is not None else megatrons
    assert length is not None
    if megatrons not in (None, length):
        raise ValueError(f"--seq {seq} contradicts --seq-length {megatrons} in the model's arguments")
    return length


def text(answer: Answer, top: int) -> str:
    """Return an answer as text: the ranked table, the recommendation, settings to paste, infeasible plans."""
    chosen, model, place = answer.chosen, answer.model, answer.place
    lines = [
        f"{model.name}: {short(model.parameters / 1e9)} billion parameters, {answer.batch} x {answer.seq} "
        f"tokens a step, mask {answer.mask}, on {place.name} (predicted, not measured)",
        "",
    ]
    if chosen is not None:
        marks = {one.plan: "+" for one in map(answer.best_of, FRAMEWORKS) if one} | {chosen.plan: "*"}
        shown = [one for number, one in enumerate(answer.ranked) if number < top or one.plan in marks]
        rows = [_row(one, marks.get(one.plan, "")) for one in shown]
        aligned = dict(zip(rows[0], ALIGNED, strict=True))
        lines.append(table(rows, LESS, aligned, disable_numparse=True))
        lines += [f"and {len(answer.ranked) - len(shown)} others"] * (len(answer.ranked) > len(shown))
        lines.append("*: recommended; +: the best plan of the other framework, with its settings below")
        lines += dict.fromkeys(f"speeds: {one.errors}" for one in shown)
    lines += ["", *recommendation(answer)]
    if answer.infeasible:
        reasons = Counter(kind(why) for _, why in answer.infeasible)
        lines += [
            f"infeasible: {len(answer.infeasible)} plans",
            *(f"  {n} plan{'s' * (n > 1)}: {why}" for why, n in reasons.items()),
        ]
    for name in dict.fromkeys(plan.framework for plan in answer.legal):
        fits = "{} tokens ({})".format(*answer.lengths[name]) if name in answer.lengths else "none fits"
        lines.append(f"longest sequence, {name}: {fits}")
    return "\n".join(lines)


def recommendation(answer: Answer) -> list[str]:
    """Return the recommended plan of an answer, its reason, and settings to paste for each framework."""
    if answer.chosen is None:
        return [answer.reason]
    plan, runs, place = answer.chosen.plan, answer.chosen.attention, answer.place
    layers = told(answer.model, runs.layout, answer.seq, plan.ring(place.ranks), place.rates)
    lines = [f"recommended: {answer.reason}", f"attention: {runs}"]
    if plan.cp > 1 and answer.model.attending:
        shard = shard_of(answer.model, plan, answer.seq)
        where = answer.seq, plan.ring(place.ranks), place.rates, answer.mask
        lines.append(beside_rule(runs.layout, shard, *where))
    lines += [*layers, "", _stack(answer.chosen), ""]
    for best in filter(None, map(answer.best_of, FRAMEWORKS)):
        title = f"{best.plan}; add {MISSING[best.plan.framework]}:"
        lines += [title, advice(best), *(f"note: {note}" for note in notes(best)), ""]
    return lines


def _row(one: PredictedStep, mark: str) -> dict[str, str]:
    return {
        "": mark,
        "plan": str(one.plan),
        "attention": f"{one.attention.ring} x{one.attention.head_parallel} {one.attention.direction}",
        "s": short(one.seconds, 4),
        "tokens/s/GPU": short(one.tokens_per_second, 4),
        "off by": one.errors.range,
        "MFU %": f"{100 * one.mfu:.1f}",
        "exposed %": f"{100 * sum(one.times.exposed.values()) / one.seconds:.1f}",
        "GB": short(total(one.memory) / 1e9),
    }


def _stack(one: PredictedStep) -> str:
    memory = ", ".join(f"{name} {short(size / 1e9)}" for name, size in one.memory.items())
    exposed = ", ".join(f"{name} {short(s)}" for name, s in one.times.exposed.items() if s >= 0.001)
    compute = ", ".join(f"{name} {short(s)}" for name, s in one.times.compute.items() if s >= 0.001)
    return f"memory, GB: {memory}\ncompute, s: {compute}\nexposed, s: {exposed or 'nothing'}"
