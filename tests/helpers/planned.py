"""What a rank plans before its first message, by name: 4096 tokens a rank, 8 ranks a node."""

import random

import torch

from burst_bench.methods.attention import share_of
from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.choose import Question, decide
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement, Ranks
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.cpu import KERNEL as CPU
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route, program
from burst_plan.machines import MACHINES

TOKENS = 4096
NODE = 8
DOCUMENT = 2048


def packed(n, seed):
    """Causal documents of half to one and a half times DOCUMENT tokens."""
    draw, ends = random.Random(seed), [0]
    while ends[-1] < n:
        ends.append(min(n, ends[-1] + draw.randint(DOCUMENT // 2, 3 * DOCUMENT // 2)))
    return Mask.causal() & Mask.documents(ends)


def _programs(mask, size, layout="zigzag"):
    """Plan rank 3's forward, and its backward with K and V rotating, on the double ring."""
    plan = plan_of(Layout(layout), mask, TOKENS * size, Placement(size))
    for pass_ in (Pass.FORWARD, Pass.KV):
        program(3, Route(size // NODE, NODE), pass_, plan)
    return plan


def _new_documents(size):
    """Plan a step with new documents: mask, plan, programs and tiles."""
    plan = _programs(packed(TOKENS * size, seed=1), size)
    for source in range(size):
        tiles_of(plan, 3, source, CPU.abilities)


def _auto(size, mask):
    """Choose as "auto" does in the first call, head_parallel=1: 32 heads, 8 K/V heads, bfloat16."""
    share = share_of(TOKENS, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    config = BurstConfig(ring="auto", head_parallel=1, backward="auto")
    rates = MACHINES["A800"].rates
    decide(config, Question(share, Layout("zigzag"), mask, TOKENS * size, Ranks(size, NODE), rates))


PLANNED = {
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
