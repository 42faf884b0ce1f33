"""What planning costs before the first message: CPU seconds and memory of one rank, from 8 to 4096 ranks.

Every figure is of a process of its own, in which nothing was planned before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from burst_bench.core import Bar, Case, Stage, Trial, World, one_of
from burst_bench.methods.attention import share_of
from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.candidates import Question, Ranks
from burst_mcore.attention.choose import decide
from burst_mcore.attention.geometry.plan import Plan, plan_for
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.cpu import KERNEL as CPU
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route, program
from burst_plan.machines import MACHINES

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


def _programs(mask: Mask, size: int, layout: str = "zigzag") -> Plan:
    """Plan rank 3's forward, and its backward with K and V travelling, on the double ring."""
    plan, route = plan_for(Layout(layout), mask, TOKENS * size, size), Route(size // NODE, NODE)
    for pass_ in (Pass.FORWARD, Pass.KV):
        program(3, route, pass_, plan)
    return plan


def _new_documents(size: int) -> None:
    """Plan a step with new documents: mask, plan, programs and tiles."""
    plan = _programs(packed(TOKENS * size, seed=1), size)
    for source in range(size):
        tiles_of(plan, 3, source, CPU.abilities)


def _auto(size: int, mask: Mask) -> None:
    """Choose as "auto" does in the first call, head_parallel=1: 32 heads, 8 K/V heads, bfloat16."""
    share = share_of(TOKENS, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    config = BurstConfig(ring="auto", head_parallel=1, backward="auto")
    rates, layout = MACHINES["A800"].rates, Layout("zigzag")
    decide(config, Question(share, layout, mask, TOKENS * size, Ranks(size, NODE), rates))


PLANNED: dict[str, Callable[[int], object]] = {
    "causal": lambda size: _programs(Mask.causal(), size),
    "full": lambda size: _programs(Mask.full(), size),
    "window": lambda size: _programs(Mask.window(TOKENS - 1, 0), size),
    "causal, striped": lambda size: _programs(Mask.causal(), size, "striped"),
    "new documents": _new_documents,
    "auto": lambda size: _auto(size, Mask.causal()),
    "auto, window": lambda size: _auto(size, Mask.window(TOKENS - 1, 0)),
    "auto, documents": lambda size: _auto(size, packed(TOKENS * size, seed=0)),
    "for_mask": lambda size: Layout.for_mask(packed(TOKENS * size, seed=0), TOKENS * size, size),
}
"""By what is planned."""


class PlanCase(Case):
    """CPU seconds and memory of one rank that plans, cold; 4096 tokens a rank, 8 a node."""

    subject = "planning"
    cold = True

    planned: str = one_of("causal", PLANNED)
    of_ranks: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of_ranks % NODE:
            raise ValueError(f"of_ranks must be a multiple of {NODE}, got {self.of_ranks}")

    @classmethod
    def named(cls, device: str) -> Mapping[str, PlanCase]:
        sizes = itertools.product(SIZES, PLANNED)
        return {f"{planned}, {size} ranks": cls(planned=planned, of_ranks=size) for size, planned in sizes}

    def prepare(self, world: World) -> Stage:
        Layout.for_mask(packed(64, seed=2), 64, 2)  # what torch does at its first operations is not planning
        return Stage(lambda method: Trial({"": partial(PLANNED[self.planned], self.of_ranks)}))

    def bars(self, device: str) -> Sequence[Bar]:
        bars = []
        if (self.planned, self.of_ranks) in BARS:
            bars.append(Bar("seconds", "burst", "cpu", BARS[self.planned, self.of_ranks]))
        if self.planned in ("causal", "full", "window") and self.of_ranks == 1024:
            bars.append(Bar("bytes", "burst", "peak", MEGABYTES * 1e6))
        return bars
