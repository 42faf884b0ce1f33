"""The ways over the ranks that a section leaves open; heads are shared within a node. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from burst_mcore.attention.autotune.candidate import Candidate
from burst_mcore.attention.autotune.choose import best
from burst_mcore.attention.autotune.decide import costed
from burst_mcore.attention.autotune.kind import typical
from burst_mcore.attention.autotune.ways import Ranks, legal_degrees
from burst_mcore.attention.shard import Shard
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates


def ways(
    config: BurstConfig, shard: Shard, mask: Mask, n: int, ranks: Ranks, rates: Rates
) -> tuple[Candidate, ...]:
    """Return the ways that `config` allows for n tokens; "auto" shares heads between ranks of one node only.

    Between nodes a ring needs neighbours alone, an all-to-all all pairs, whose contention the cost model does
    not know.
    """
    degrees = None
    if config.head_parallel == "auto":
        degrees = tuple(d for d in legal_degrees(ranks, shard.heads, shard.kv_heads) if d <= ranks.intra)
    return costed(_inner(config), Layout.of(config.layout), ranks, rates, shard, mask, n, degrees)


def _inner(config: BurstConfig) -> BurstConfig:
    """Return the configuration with groups of neighbours, unless it says where members are."""
    return replace(config, head_placement="inner") if config.head_placement == "auto" else config


@lru_cache(maxsize=64)
def within_nodes(
    config: BurstConfig, shard: Shard, mask: Mask, n: int, ranks: Ranks, rates: Rates
) -> BurstConfig:
    """`config` with the best degree that stays in a node, where it leaves the degree open over several."""
    if config.head_parallel != "auto" or ranks.size == ranks.intra:
        return config
    layout, mask = typical(Layout.of(config.layout), mask, n, ranks.size)
    degree = _degree_of_kind(replace(config, layout=layout), shard, mask, n, ranks, rates)
    return replace(_inner(config), head_parallel=degree)


@lru_cache(maxsize=64)
def _degree_of_kind(config: BurstConfig, shard: Shard, mask: Mask, n: int, ranks: Ranks, rates: Rates) -> int:
    return best(ways(config, shard, mask, n, ranks, rates)).route.heads
