"""The query-key pairs that each ring rank of a route computes, and the tiles in which it computes them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import torch

from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Kernel
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.layout.balance import work

KINDS = ("full", "causal", "window", "packed", "masked")
"""Kinds of tiles."""


def unevenness(plan: Plan, pass_: Pass) -> float:
    """Return the busiest ring rank's pairs in a pass over the mean: 1.0 is balanced."""
    placement = plan.placement
    of_ranks = work(plan.layout, plan.mask, plan.n, placement.size)[pass_ == Pass.QUERY].double()
    ring_rank = placement.ring_rank(torch.arange(placement.size))
    pairs = of_ranks.new_zeros(placement.ring_size).index_add_(0, ring_rank, of_ranks)
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0


def _kind_of(tile: Tile) -> str:
    """Return the kind of a tile, one of `KINDS`."""
    if tile.pattern.masked:
        return "packed" if tile.pattern.packed else "masked"
    if tile.pattern.full:
        return "full"
    return "causal" if tile.pattern.causal else "window"


def tiles_summary(plan: Plan, pass_: Pass, kernel: Kernel) -> str:
    """Say how many tiles all ring ranks compute in a pass, and how many of their pairs are allowed."""
    kinds: Counter[str] = Counter()
    allowed = computed = 0
    for ring_rank, source in product(range(plan.size), repeat=2):
        at = (source, ring_rank) if pass_ == Pass.QUERY else (ring_rank, source)
        for tile in tiles_of(plan, *at, kernel.abilities):
            kinds[_kind_of(tile)] += 1
            allowed += tile.pattern.pairs
            computed += prod(tile.pattern.shape) if _kind_of(tile) == "masked" else tile.pattern.pairs
    each = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    return (
        f"tiles:  {kinds.total()} for kernel {kernel.name} ({each}), {computed:,} pairs, of which the mask "
        f"allows {allowed / max(1, computed):.1%}"
    )
