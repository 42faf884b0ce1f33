"""The catalogue of cases: those of every run, those of which some are drawn, and passes that are counted."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.numerics import merge
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment
from burst_plan.step.memory import backward_bytes

from . import cases, failures

DOUBLE = {"intra": 2, "ring": "double"}
CASES = {
    "ring": (cases.attention, 3, {"backward": "query"}),
    "ring, keys": (cases.attention, 3, {"backward": "kv"}),
    "ring of few rows": (cases.attention, 3, {"mask": "window", "ring": "flat", "backward": "query"}),
    "stock kernel": (cases.attention, 3, {"kernel": "aten-flash"}),
    "stock kernel, keys": (cases.attention, 2, {"kernel": "cudnn", "backward": "kv"}),
    "lse": (cases.attention, 2, {"kernel": "flash4", "lse": True}),
    "no overlap": (cases.attention, 2, {"overlap": False}),
    "documents": (cases.attention, 2, {"kernel": "flash2", "mask": "documents"}),
    "blocks": (cases.attention, 2, {"steps": 1, "mask": "documents", "layout": "striped"}),
    "dilated": (cases.attention, 2, {"steps": 1, "mask": "dilated"}),
    "direct": (cases.attention, 3, {"steps": 1, "ring": "direct", "kernel": "flash3"}),
    "double ring": (cases.attention, 4, DOUBLE),
    "double ring, keys": (cases.attention, 4, {**DOUBLE, "backward": "kv"}),
    "heads": (cases.attention, 4, {"steps": 1, "head_parallel": 4, "backward": "kv"}),
    "heads and ring": (cases.attention, 4, {"steps": 1, "head_parallel": 2}),
    "latent": (cases.attention, 2, {"latent": "on"}),
    "part of the world": (cases.attention, 2, {"world": 3, "bound": True}),
    "recompute": (cases.recompute, 2, {"policy": Full, "again": True}),
    "keep": (cases.recompute, 2, {"policy": KeepAttention, "again": False}),
    "segment": (cases.recompute, 2, {"policy": lambda: Segment(0.5), "again": True}),
    "offload": (cases.recompute, 2, {"policy": lambda: Offload(KeepAttention()), "again": False}),
    "offload of a part": (cases.recompute, 2, {"policy": lambda: Offload(Segment(0.5)), "again": True}),
    "loss": (cases.loss, 1, {"waits": 1}),
    "loss, tp": (cases.loss, 2, {"tp": True, "waits": 6}),
    "loss, sequence parallel": (cases.loss, 2, {"tp": True, "sequence_parallel": True, "waits": 6}),
    "loss, cp": (cases.loss, 2, {"cp": True, "waits": 3}),
    **{name: (failures.failure, 3, options) for name, options in failures.FAILURES.items()},
    "loss of tokens": (cases.loss, 2, {"tp": True, "reduction": "none", "waits": 9}),
}
"""By name: a function, ranks, and what the ranks do."""


def run(name: str) -> Counter[str]:
    """Return what is found in a case."""
    function, size, options = CASES[name]
    return function(size, **options)


ROUTES = (
    (2, {}),
    (3, {"ring": "direct"}),
    (4, {}),
    (4, DOUBLE),
    (4, {"intra": 2, "ring": "flat"}),
    (4, {"intra": 2, "ring": "direct"}),
    (4, {"head_parallel": 2}),
    (4, {"head_parallel": 2, "intra": 2, "head_placement": "outer"}),
    (4, {"head_parallel": 4}),
)
KERNELS = "triton", "aten-flash", "cudnn", "flash2", "flash3", "flash4"
GRID = [
    {"kernel": kernel, "mask": mask, "layout": layout, "backward": backward}
    for mask, layout, backward in itertools.product(cases.MASKS, ("zigzag", "striped"), ("query", "kv"))
    for kernel in KERNELS  # one after the other, since their plans are the same
    if (kernel, mask) != ("cudnn", "documents")  # it does not take them
]
"""Routes, with their ranks; and every combination that may be asked of one."""


def grid_of(route: int) -> list[dict[str, Any]]:
    """Return a quarter of `GRID`, for the route of an index: two or three routes meet each row."""
    return GRID[route % 4 :: 4]


PASSES: dict[str, dict[str, Any]] = {
    "ring": {"backward": "query", "kv_heads": 4},
    "ring, keys rotate": {"backward": "kv"},
    "ring, own kernel": {"kernel": "triton", "backward": "kv"},
    "double ring": {**DOUBLE, "backward": "query", "kv_heads": 4},
    "direct": {"ring": "direct", "backward": "kv"},
    "heads": {"head_parallel": 4},
}
"""By route of 4 ranks with 4 heads: options of `cases.attention`."""


def counted(name: str) -> tuple[int, float, int, float]:
    """Return launches and peak memory over Q's, of forward and of backward, on the worst rank of a route."""
    options = {"kernel": "flash3", **PASSES[name]}
    gc.collect()  # memory of earlier cases that is freed within a pass would count as free in its peak
    assert not cases.attention(4, **options)
    q = cases.TOKENS * 4 * 16 * (4 if options["kernel"] == "triton" else 2)
    numbers: list[Any] = []
    for of_rank in (cases.FORWARD, cases.BACKWARD):
        numbers += [max(launches.total() for launches, _ in of_rank.values())]
        numbers += [round(max(peak for _, peak in of_rank.values()) / q, 1)]
    return tuple(numbers)


LARGE = [
    (*ring, *way)
    for ring in ((4, 0), (4, 2), (8, 0), (8, 4), (8, 2), (16, 4), (16, 2))
    for way in ((4, "query"), (1, "kv"))
]
"""Ranks, those of a node (0: all), K/V heads beside 4 heads, and what rotates."""


def backward_of_q(
    size: int, intra: int, kv_heads: int, backward: str, head_dim: int = 16
) -> tuple[float, float]:
    """Return (the peak of backward, that peak as the planner counts it), over Q's bytes, of large parts."""
    ring = {"intra": intra, "ring": "double"} if intra else {"ring": "flat"}
    options = {"kv_heads": kv_heads, "head_dim": head_dim, "backward": backward, "steps": 1, **ring}
    shapes = {"heads": 4, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    shard = Shard(batch=1, tokens=cases.TOKENS, dtype=torch.bfloat16, **shapes)
    nodes = size // intra if intra else 1
    gc.collect()  # as above
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge.GradientSum, "waiting_bytes", 0)
        assert not cases.attention(size, "flash3", **options)
        planned = backward_bytes(shard, size, nodes, of_queries=backward == "query")
    return max(peak for _, peak in cases.BACKWARD.values()) / shard.q_bytes, planned / shard.q_bytes
