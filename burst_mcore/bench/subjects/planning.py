"""What planning costs before the first message: CPU seconds and memory of one rank, from 8 to 4096 ranks.

Every figure is of a process of its own, in which nothing was planned before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from burst_mcore.attention.autotune.choose import RINGS, Ranks, best, contenders, typical
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.aten import CPU
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.core import Bar, Case, Method, Stage, Subject, Trial, World
from burst_mcore.layout import Layout
from burst_mcore.machines import MACHINES
from burst_mcore.mask import Mask

TOKENS = 4096
"""Of a rank."""
NODE = 8
"""Ranks of a node."""
DOCUMENT = 2048
"""Tokens of a document, on average; none is shorter than half of that, or longer than one and a half."""
SIZES = (8, 64, 256, 1024, 4096)

BARS = {
    ("causal", 64): 0.05, ("full", 64): 0.05, ("window", 64): 0.05,
    ("causal", 1024): 1.0, ("full", 1024): 1.0, ("window", 1024): 1.0,
    ("auto", 1024): 2.0, ("auto, window", 1024): 2.0, ("auto, documents", 1024): 2.0, ("for_mask", 1024): 2.0,
    ("new documents", 8): 0.02, ("new documents", 64): 0.06, ("new documents", 256): 0.5,
}  # fmt: skip
"""Seconds, at most, by what is planned and ranks."""
MEGABYTES = 300
"""Memory that a plan of 1024 ranks may take beyond that of `import torch`."""


def packed(n: int, seed: int) -> Mask:
    """Causal documents of about `DOCUMENT` tokens."""
    draw, ends = random.Random(seed), [0]
    while ends[-1] < n:
        ends.append(min(n, ends[-1] + draw.randint(DOCUMENT // 2, 3 * DOCUMENT // 2)))
    return Mask.causal() & Mask.documents(ends)


def _program(mask: Mask, layout: Layout, size: int) -> None:
    """Rank 3's forward, and backward with K and V travelling, on the double ring."""
    plan, route = plan_for(layout, mask, TOKENS * size, size), Route(size // NODE, NODE)
    for pass_ in (Pass.FORWARD, Pass.KV):
        program(3, route, pass_, plan)


def _new_documents(size: int) -> None:
    """Plan a step with new documents: mask, plan, programs and tiles."""
    n, route = TOKENS * size, Route(size // NODE, NODE)
    mask, layout = packed(n, seed=1), Layout("zigzag")
    plan = plan_for(layout, mask, n, size)
    for pass_ in (Pass.FORWARD, Pass.KV):
        program(3, route, pass_, plan)
    for source in range(size):
        tiles_of(plan, 3, source, CPU.abilities)


def _auto(size: int, mask: Mask) -> None:
    """Choose as "auto" does in the first call, head_parallel=1: 32 heads, 8 K/V heads, bfloat16."""
    layout, mask = typical(Layout("zigzag"), mask, TOKENS * size, size)
    shard = Shard(
        batch=1, tokens=TOKENS, heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16
    )
    played, _ = contenders(
        shard, layout, mask, TOKENS * size, Ranks(size, NODE), MACHINES["A800"].rates,
        overlap=True, rings=RINGS, degrees=(1,), directions=(Pass.QUERY, Pass.KV),
    )  # fmt: skip
    best(played)


PLANNED: dict[str, Callable[[int], object]] = {
    "causal": lambda size: _program(Mask.causal(), Layout("zigzag"), size),
    "full": lambda size: _program(Mask.full(), Layout("zigzag"), size),
    "window": lambda size: _program(Mask.window(TOKENS - 1, 0), Layout("zigzag"), size),
    "causal, striped": lambda size: _program(Mask.causal(), Layout("striped"), size),
    "new documents": _new_documents,
    "auto": lambda size: _auto(size, Mask.causal()),
    "auto, window": lambda size: _auto(size, Mask.window(TOKENS - 1, 0)),
    "auto, documents": lambda size: _auto(size, packed(TOKENS * size, seed=0)),
    "for_mask": lambda size: Layout.for_mask(packed(TOKENS * size, seed=0), TOKENS * size, size),
}
"""By what is planned."""


@dataclass(frozen=True, kw_only=True)
class PlanCase(Case):
    """What one rank plans for a number of ranks. Raises ValueError where a field is not legal."""

    planned: str = "causal"
    of_ranks: int = 64

    def __post_init__(self) -> None:
        if self.planned not in PLANNED:
            raise ValueError(f"unknown {self.planned!r}; legal: {', '.join(PLANNED)}")
        if self.of_ranks < NODE or self.of_ranks % NODE:
            raise ValueError(f"of_ranks must be a multiple of {NODE}, got {self.of_ranks}")


def _cases(device: str) -> Mapping[str, PlanCase]:
    return {
        f"{planned}, {size} ranks": PlanCase(planned=planned, of_ranks=size)
        for size in SIZES
        for planned in PLANNED
    }


def _stage(case: PlanCase, world: World) -> Stage:
    Layout.for_mask(packed(64, seed=2), 64, 2)  # what torch does at its first operations is not planning

    def plan_once() -> None:
        PLANNED[case.planned](case.of_ranks)

    return Stage(lambda method: Trial({"": plan_once}))


def _build(case: Any, world: World) -> None:
    """Nothing is made before it is measured."""


def _methods(case: PlanCase) -> Mapping[str, Method]:
    return {"burst": Method("burst", _build)}


def _bars(name: str, case: PlanCase | None, device: str) -> Sequence[Bar]:
    if case is None:
        return ()
    bars = []
    if (case.planned, case.of_ranks) in BARS:
        bars.append(Bar("seconds", "burst", "cpu", BARS[case.planned, case.of_ranks]))
    if case.planned in ("causal", "full", "window") and case.of_ranks == 1024:
        bars.append(Bar("bytes", "burst", "peak", MEGABYTES * 1e6))
    return bars


SUBJECT = Subject(
    name="planning",
    about=f"CPU seconds and memory of one rank that plans, cold; {TOKENS} tokens a rank, {NODE} a node.",
    case=PlanCase,
    cases=_cases,
    stage=_stage,
    kind="",
    methods=_methods,
    cold=True,
    bars=_bars,
)
