"""The ways that a configuration allows, with their costs; and a call's route, decided once for each kind."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from burst_mcore.attention.autotune.candidate import Candidate, Slower
from burst_mcore.attention.autotune.choose import best, reason
from burst_mcore.attention.autotune.kind import typical
from burst_mcore.attention.autotune.search import candidates, contenders
from burst_mcore.attention.autotune.ways import (
    RINGS,
    Ranks,
    backward_passes,
    factors,
    legal_degrees,
    overlaps,
    route_for,
    why_not_degree,
)
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.config import BurstConfig, sides_of
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

logger = logging.getLogger("burst_mcore")


@lru_cache(maxsize=256)
def choose_route(
    config: BurstConfig, ranks: Ranks, rates: Rates, shard: Shard, mask: Mask, n: int
) -> tuple[Route, Pass]:
    """Return the route and the backward pass, decided once for each kind of layout and mask."""
    layout, mask = typical(Layout.of(config.layout), mask, n, ranks.size)
    return _route_of_kind(without_layout(config), layout, ranks, rates, shard, mask, n)


@lru_cache(maxsize=256)
def latent_gains(
    config: BurstConfig, ranks: Ranks, rates: Rates, travelling: Shard, mask: Mask, n: int
) -> bool:
    """Return whether the model predicts a gain if the latent travels, and not K and V.

    The call may not be slower; if both are as fast, the order of `best` decides, as by bytes between nodes.

    travelling: the shapes where the latent travels.
    """
    if ranks.size == 1:
        return False
    layout, mask = typical(Layout.of(config.layout), mask, n, ranks.size)
    options = without_layout(config), layout, ranks, rates
    latent = fastest(*options, travelling, mask, n)
    expanded = fastest(*options, replace(travelling, latent_travels=False), mask, n)
    gains = latent.seconds <= expanded.seconds and best([expanded, latent]) is latent
    logger.info(
        "MLA: %s travel: predicted %.3g s with the latent, %.3g s with K and V",
        "the latent and its rope key" if gains else "K and V",
        latent.seconds,
        expanded.seconds,
    )
    return gains


def costed(
    config: BurstConfig,
    layout: Layout,
    ranks: Ranks,
    rates: Rates,
    shard: Shard,
    mask: Mask,
    n: int,
    degrees: tuple[int, ...] | None = None,
) -> tuple[Candidate, ...]:
    """Return every way that a configuration allows, with its cost; the layout of `config` is not used.

    degrees: those of head parallelism to try; default all that the configuration allows.
    """
    settings = settings_of(config, ranks, shard, degrees)
    return candidates(shard, layout, mask, n, ranks, rates, **settings)


def fastest(
    config: BurstConfig, layout: Layout, ranks: Ranks, rates: Rates, shard: Shard, mask: Mask, n: int
) -> Candidate:
    """Return the way that "auto", or the configured way, takes; the layout of `config` is not used."""
    return best(_contending(config, layout, ranks, rates, shard, mask, n)[0])


def _contending(
    config: BurstConfig, layout: Layout, ranks: Ranks, rates: Rates, shard: Shard, mask: Mask, n: int
) -> tuple[tuple[Candidate, ...], tuple[Slower, ...]]:
    return contenders(shard, layout, mask, n, ranks, rates, **settings_of(config, ranks, shard))


def settings_of(
    config: BurstConfig, ranks: Ranks, shard: Shard, degrees: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Return the fields of `search.Settings` that a configuration allows."""
    return {
        "overlap": config.overlap,
        "rings": RINGS if config.ring == "auto" else (config.ring,),
        "degrees": degrees_of(config, ranks, shard) if degrees is None else degrees,
        "directions": backward_passes(config.backward),
        "placement": config.head_placement,
        "mesh": config.mesh,
    }


@lru_cache(maxsize=64)
def without_layout(config: BurstConfig) -> BurstConfig:
    """Return the configuration that stands for all which differ from it in their layout alone."""
    return replace(config, layout="zigzag")


@lru_cache(maxsize=64)
def _route_of_kind(
    config: BurstConfig, layout: Layout, ranks: Ranks, rates: Rates, shard: Shard, mask: Mask, n: int
) -> tuple[Route, Pass]:
    """Decide "auto" by the cost model, and log it once; the layout of `config` is not used."""
    degrees = degrees_of(config, ranks, shard)
    directions = backward_passes(config.backward)
    only = config.mesh == "none" and degrees == (ranks.size,) and len(directions) == 1
    if ranks.size == 1 or only:
        overlap = overlaps(config.overlap, degrees[0], ranks, rates)
        ring = RINGS[0] if config.ring == "auto" else config.ring
        return route_for(degrees[0], ranks, ring=ring, overlap=overlap), directions[0]
    contending, slower = _contending(config, layout, ranks, rates, shard, mask, n)
    chosen = best(contending)
    logger.info("%s, backward %s: %s", chosen.route, chosen.direction, reason(chosen, contending, slower))
    return chosen.route, chosen.direction


def degrees_of(config: BurstConfig, ranks: Ranks, shard: Shard) -> tuple[int, ...]:
    """Return the degrees of head parallelism to choose from; ValueError if the configured one is illegal."""
    degree, named = config.head_parallel, f"head_parallel={config.head_parallel}"
    if sides := sides_of(config.mesh):
        check_mesh(config, sides, ranks)
        degree = ranks.size // math.prod(sides)
        named = f"mesh={config.mesh}, and so head_parallel={degree},"
    if not isinstance(degree, int):
        return tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    why_not = why_not_degree(degree, ranks, shard.heads, shard.kv_heads)
    if why_not is not None:
        raise ValueError(
            f"{named} is not legal with {shard.heads} heads, {shard.kv_heads} K/V heads and "
            f"{ranks.size} ranks, {ranks.intra} a node: {why_not}; legal: "
            f"{legal_degrees(ranks, shard.heads, shard.kv_heads)}"
        )
    return (degree,)


def check_mesh(config: BurstConfig, sides: tuple[int, int], ranks: Ranks) -> None:
    """Raise ValueError if the configured mesh does not go with so many ranks."""
    rows, columns = sides
    degree = config.head_parallel
    if ranks.size % (rows * columns) or (degree != "auto" and rows * columns * degree != ranks.size):
        legal = f"sides and degrees that divide {ranks.size}"
        if isinstance(degree, int) and ranks.size % degree == 0:
            legal = ", ".join(f"{a}x{b}" for a, b in factors(ranks.size // degree))
        raise ValueError(
            f"mesh={rows}x{columns} with head_parallel={degree} is not legal: rows x columns x head_parallel "
            f"must be the {ranks.size} ranks; legal: {legal}"
        )
