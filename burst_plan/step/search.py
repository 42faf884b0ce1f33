"""The search over all plans to train a model on a cluster: feasible plans ranked, others with the reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from burst_mcore.attention.choose import AS_FAST
from burst_mcore.attention.geometry.shard import Ranks
from burst_plan.step.advice import advice, notes
from burst_plan.step.figures import Cluster, PredictedStep, short, step
from burst_plan.step.memory import longest, shard_of, stack, total
from burst_plan.step.model import Model
from burst_plan.step.plan import FRAMEWORKS, Plan, why_not
from burst_plan.words import mask_of

RECOMPUTES = (("none", 1.0), ("attention", 1.0), ("segment", 0.5), ("full", 0.0))


@dataclass(frozen=True)
class Answer:
    """The result of a search."""

    model: Model
    seq: int
    batch: int
    place: Cluster
    ranked: list[PredictedStep]
    """Feasible plans, the fastest first."""
    infeasible: list[tuple[Plan, str]]
    """Infeasible plans, with reasons."""
    legal: list[Plan]
    """Plans that are feasible apart from memory."""
    mask: str = "causal"

    @cached_property
    def lengths(self) -> dict[str, tuple[int, Plan]]:
        """By framework: the longest sequence that fits, and its plan."""
        return lengths(self.model, self.place, self.legal)

    @property
    def chosen(self) -> PredictedStep | None:
        """The recommended plan."""
        return min(_close(self.ranked), key=_plain, default=None)

    def best_of(self, framework: str) -> PredictedStep | None:
        """Return the recommended plan of a framework."""
        steps = [one for one in self.ranked if one.plan.framework == framework]
        as_fast = [one for one in _close(self.ranked) if one in steps] or _close(steps)
        return min(as_fast, key=_plain, default=None)

    @property
    def reason(self) -> str:
        """The reason for the recommended plan, in a sentence."""
        chosen = self.chosen
        if chosen is None:
            return f"no plan fits {self.seq} tokens; {self._fitting()}"
        close = _close(self.ranked)
        least = f" (of {len(close)} equally fast plans the one that offloads least, then takes least memory)"
        return (
            f"{chosen.plan} is fastest{least if len(close) > 1 else ''}: {waits(chosen)}, "
            f"{short(total(chosen.memory) / 1e9)} of {short(self.place.memory / 1e9)} GB are taken, "
            f"{self._without_offload(chosen)}and {self._beside(chosen)}. Its speed is {chosen.errors}"
        )

    def _fitting(self) -> str:
        """Return a note on the length that would fit."""
        if not self.lengths:
            return "nor does any plan fit a shorter sequence"
        seq, plan = max(self.lengths.values(), key=lambda one: one[0])
        return f"{seq} tokens would fit ({plan})"

    def _without_offload(self, chosen: PredictedStep) -> str:
        """Return the reason why a plan offloads; nothing for a plan without offload."""
        plain = replace(chosen.plan, offload_optimizer=False, offload_activations=False)
        if plain == chosen.plan:
            return ""
        why = next((why for plan, why in self.infeasible if plan == plain), None)
        if why is not None:
            return f"without offload it is {why}, "
        slower = next(one for one in self.ranked if one.plan == plain)  # the host may have the faster memory
        return f"without offload it takes {slower.seconds / chosen.seconds - 1:.1%} longer, "

    def _beside(self, chosen: PredictedStep) -> str:
        """Return a note on the time of the next slower plan."""
        close = _close(self.ranked)
        if len(close) < len(self.ranked):
            slower = self.ranked[len(close)]
            differs = slower.errors.kind != chosen.errors.kind
            of_kind = f" (errors of its kind, {slower.errors.kind}: {slower.errors.range})" * differs
            return f"{slower.plan} takes {slower.seconds / chosen.seconds - 1:.1%} longer{of_kind}"
        return "no other plan fits" if len(close) == 1 else "all other plans that fit are as fast"

    def as_json(self) -> dict[str, Any]:
        """Return all of it as data: bytes, seconds, tokens."""
        chosen = self.chosen
        return {
            "model": asdict(self.model) | {"parameters": self.model.parameters},
            "cluster": {
                "name": self.place.name, "gpus": self.place.ranks.size, "per_node": self.place.ranks.intra,
                "memory": self.place.memory, "peak": self.place.peak,
            },
            "seq": self.seq,
            "batch": self.batch,
            "mask": self.mask,
            "recommended": None if chosen is None else chosen.as_json(),
            "reason": self.reason,
            "paste": {one.plan.framework: advice(one) for one in map(self.best_of, FRAMEWORKS) if one},
            "notes": {one.plan.framework: notes(one) for one in map(self.best_of, FRAMEWORKS) if one},
            "plans": [one.as_json() for one in self.ranked],
            "infeasible": [{"plan": asdict(plan), "words": str(plan), "why": why}
                           for plan, why in self.infeasible],
            "longest": {name: {"seq": seq, "plan": asdict(plan), "words": str(plan)}
                        for name, (seq, plan) in self.lengths.items()},
            "predicted": True,
        }  # fmt: skip


def _close(ranked: list[PredictedStep]) -> list[PredictedStep]:
    """Return the plans as fast as the first: the least offloading first, then the least memory."""
    return [one for one in ranked if one.seconds <= AS_FAST * ranked[0].seconds]


def waits(step: PredictedStep) -> str:
    """Return a note on the share of exposed communication and waiting in a step, and its main cause."""
    exposed = step.times.exposed
    share = sum(exposed.values()) / step.seconds
    cause = max(exposed, key=exposed.__getitem__, default="")
    cause_words = f" (most: {cause})" if share >= 0.005 else ""
    return f"{share:.0%} of a step is exposed communication or waiting{cause_words}"


def _plain(step: PredictedStep) -> tuple[int, float]:
    return step.plan.offload_optimizer + step.plan.offload_activations, total(step.memory)


def search(
    model: Model,
    seq: int,
    batch: int,
    place: Cluster,
    pinned: Mapping[str, int] | None = None,
    mask: str = "causal",
    frameworks: Sequence[str] = FRAMEWORKS,
) -> Answer:
    """Predict every plan to train `batch` sequences a step.

    Args:
        pinned: degrees that the user gave: "tp", "cp", "pp", "ep".
        mask: of all layers, as an expression.

    Raises:
        ValueError: degrees that contradict the cluster, the model or the batch, or a mask that does not go.
    """
    pinned = dict(pinned or {})
    mask_of(mask, seq)
    ranked, infeasible, legal = [], [], []
    for plan in plans(model, place.ranks, batch, pinned, frameworks):
        reason = why_not(plan, model, seq, place.ranks)
        if reason is not None:
            infeasible.append((plan, reason))
            continue
        legal.append(plan)
        # Memory first: attention is simulated, which takes longer.
        reason = too_large(least(model, plan, seq), place)
        if reason is None:
            predicted = step(model, plan, seq, place, mask)
            reason = too_large(predicted.memory, place)
        if reason is None:
            ranked.append(predicted)
        else:
            infeasible.append((plan, reason))
    if not legal:
        degrees = ", ".join(f"{name.upper()} {n}" for name, n in pinned.items()) or "any degrees"
        why = infeasible[0][1] if infeasible else _why_none(place.ranks, batch, pinned)
        raise ValueError(f"no plan over {place.ranks.size} ranks with {degrees}: {why}")
    ranked.sort(key=lambda one: one.seconds)
    return Answer(model, seq, batch, place, ranked, infeasible, legal, mask)


def _why_none(cluster: Ranks, batch: int, pinned: Mapping[str, int]) -> str:
    """Return why the given degrees make up no cluster, or leave no legal data parallelism."""
    product = math.prod(pinned.get(name, 1) for name in ("tp", "cp", "pp"))
    if cluster.size % product:
        return f"{product} ranks of a replica do not divide {cluster.size}"
    if pinned.get("tp", 1) > cluster.intra:
        return f"TP is searched within nodes of {cluster.intra}"
    return f"{batch} sequences do not divide over {cluster.size // product} data parallel ranks"


def kind(why: str) -> str:
    """Return a reason without its numbers of bytes, so that similar reasons are counted together."""
    if not why.startswith("out of memory"):
        return why
    return f"out of memory, most of it {why.rpartition('most of it ')[2]}"


def least(model: Model, plan: Plan, seq: int, nodes: int = 1) -> dict[str, float]:
    """Return the stack of the attention schedule with the least memory: a ring, or heads shared by all."""
    groups = {1, plan.cp} if shard_of(model, plan, seq).kv_heads % plan.cp == 0 else {1}
    runs = itertools.product(("query", "kv"), (nodes,), groups, ("contiguous",))  # has fewest fragments
    return min((stack(model, plan, seq, *run) for run in runs), key=total)


def too_large(memory: dict[str, float], place: Cluster) -> str | None:
    """Return why a stack does not fit a GPU; None if it fits."""
    if total(memory) <= place.usable:
        return None
    largest = max(memory, key=memory.__getitem__)
    return (
        f"out of memory: {short(total(memory) / 1e9)} GB of {short(place.usable / 1e9)}, most of it {largest}"
    )


def plans(
    model: Model, cluster: Ranks, batch: int, pinned: Mapping[str, int], frameworks: Sequence[str]
) -> Iterator[Plan]:
    """Yield all plans whose degrees make up the cluster and whose ranks divide the batch."""
    for framework in frameworks:
        for degrees in _degrees(framework, model, cluster, batch, pinned):
            if framework == "deepspeed" and degrees["ep"] > 1:  # once, for the reason
                yield Plan(framework=framework, zero=3, **degrees)
                continue
            # One rank has nothing to shard: the stages of ZeRO are the same.
            stages = (1,) if framework == "megatron" or cluster.size == 1 else (1, 2, 3)
            for zero, chunks in itertools.product(stages, (1, 2) if degrees["pp"] > 1 else (1,)):
                base = Plan(framework=framework, zero=zero, chunks=chunks, **degrees)
                for (recompute, keep), fused in itertools.product(RECOMPUTES, (True, False)):
                    plan = replace(base, recompute=recompute, keep=keep, fused_loss=fused)
                    hosts = (False, True) if recompute in ("attention", "segment") else (False,)
                    for optimizer, activations in itertools.product((False, True), hosts):
                        yield replace(plan, offload_optimizer=optimizer, offload_activations=activations)


def _degrees(
    framework: str, model: Model, cluster: Ranks, batch: int, pinned: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    divisors = [n for n in range(1, cluster.size + 1) if cluster.size % n == 0]
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        if any(pinned.get(name, n) != n for name, n in (("tp", tp), ("pp", pp), ("cp", cp))):
            continue
        if framework == "deepspeed" and (tp > 1 or pp > 1):
            continue
        dp, remainder = divmod(cluster.size, tp * pp * cp)
        if remainder or dp < 1 or batch % dp or tp > cluster.intra:
            continue
        alike = math.gcd(cp * dp, model.experts) if model.experts else 1
        experts = [pinned["ep"]] if "ep" in pinned else [n for n in divisors if alike % n == 0]
        for ep in experts:
            yield {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "micro": batch // dp}


def lengths(model: Model, place: Cluster, legal: list[Plan]) -> dict[str, tuple[int, Plan]]:
    """Return the longest sequence of each framework, which memory alone limits."""
    longest_of: dict[str, tuple[int, Plan]] = {}
    for plan in legal:
        nodes = -(-plan.cp // plan.ring(place.ranks).intra)
        fits, unit = partial(_holds, model, plan, nodes, place.usable), 2 * plan.cp * plan.tp
        best = longest_of.get(plan.framework, (0, plan))[0]
        if fits((best // unit + 1) * unit) and (seq := longest(fits, unit)) > best:
            longest_of[plan.framework] = seq, plan
    return longest_of


def _holds(model: Model, plan: Plan, nodes: int, usable: float, seq: int) -> bool:
    """Return whether a sequence fits with the schedule of least memory."""
    return total(least(model, plan, seq, nodes)) <= usable
