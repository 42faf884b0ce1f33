"""The search over the ways to run a call: one pass, from the plainest way on."""

from __future__ import annotations

import gc
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial

from burst_mcore.attention.autotune.choose import AS_FAST, Candidate, Family, best, reason
from burst_mcore.attention.autotune.costing import Costs
from burst_mcore.attention.autotune.question import Question, Settings, routes, settings_of
from burst_mcore.attention.autotune.ways import RINGS
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import BurstConfig

logger = logging.getLogger("burst_mcore")

MOST_RESIDENT = 4 * 2**30
"""Bytes that a mesh may hold of other ranks, at most, to be considered where meshes are searched."""
PARTNERS = 2**14
"""Pairs of positions that exchange rows, at most, for a direct exchange to be considered beside rings. Every
pair is a connection, and is simulated one by one."""
MANY = 64
"""Ranks up to which a call tries all direct exchanges. Beyond, it tries the side of the best way so far, and
beside shared heads only `FEW` messages unless their degree is set: 1024 ranks would take a minute."""
FEW = 2**10
"""Messages of a direct exchange with shared heads, at most, in the search of a call on many ranks."""


@lru_cache(maxsize=64)
def candidates(question: Question, settings: Settings, *, every: bool = True) -> tuple[Candidate, ...]:
    """Return every combination of ring, degree and direction with its cost; rings the better way round.

    A direct exchange between very many pairs (`PARTNERS`) is left out where there is a ring as well.

    Args:
        every: False ends the search where no later way can be the best: the best so far is plainer, and takes
            hardly longer than the kernel alone.
    """
    costs_at = cache(partial(Costs, question))
    costed: list[Candidate] = []
    families: dict[Family, list[tuple[Route, str]]] = defaultdict(list)
    for route, ring in routes(question, settings).items():
        families[Family.of(route, question.ranks.intra)].append((route, ring))
    with _collector_paused():
        for family in sorted(families):
            for route, ring in families[family]:
                costs = costs_at(route.placement)
                quick = not every and question.ranks.size > MANY
                one_side = quick and route.direct and costed
                sides = (best(costed).direction,) if one_side else settings.directions
                ways = [(route, side) for side in sides if _may_be(costs, route, side, settings, quick)]
                costs.play(ways)  # both directions at once, at little more than one's cost
                costed += (
                    best([costs.candidate(ring, way, direction) for way in costs.ways(route)])
                    for _, direction in ways
                )
            if not every and costed and best(costed).seconds <= AS_FAST * costs.least:
                break
    return tuple(costed)


def costed(
    config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None, *, meshes: bool = False
) -> tuple[Candidate, ...]:
    """Return every way that a configuration allows, with its cost: flat rings, too, which "auto" never takes.

    Args:
        degrees: those of head parallelism to try; default all that the configuration allows.
        meshes: also try every mesh.
    """
    settings = settings_of(config, question, degrees)
    rings = RINGS if config.ring == "auto" else settings.rings
    return candidates(question, replace(settings, rings=rings, mesh="auto" if meshes else config.mesh))


def tried(config: BurstConfig, question: Question) -> tuple[Candidate, ...]:
    """Return the ways that a call tries, with their costs; the layout of `config` is not used."""
    return candidates(question, settings_of(config, question), every=False)


def fastest(config: BurstConfig, question: Question) -> Candidate:
    """Return the way that a call takes; the layout of `config` is not used."""
    return best(tried(config, question))


def search(question: Question, settings: Settings, travels: str) -> tuple[Route, Pass, bool]:
    """Return the route and the backward pass of the best way, and whether the latent travels; log them."""
    if travels == "auto":
        travels = "on" if _latent_gains(question, settings) else "off"
    ways = candidates(_with_latent(question, travels), settings, every=False)
    chosen = best(ways)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s, backward %s: %s", chosen.route, chosen.direction, reason(chosen, ways))
    return chosen.route, chosen.direction, travels == "on"


def _with_latent(question: Question, travels: str) -> Question:
    """Return the question where the latent travels, or K and V."""
    return replace(question, shard=replace(question.shard, latent_travels=travels == "on"))


def _latent_gains(question: Question, settings: Settings) -> bool:
    """Return whether the model predicts a gain if the latent travels, and not K and V.

    The call may not be slower; if both are as fast, the order of `best` decides, as by bytes between nodes.
    """
    expanded, latent = (
        best(candidates(_with_latent(question, travels), settings, every=False)) for travels in ("off", "on")
    )
    gains = latent.seconds <= expanded.seconds and best([expanded, latent]) is latent
    logger.info(
        "MLA: %s travel: predicted %.3g s with the latent, %.3g s with K and V",
        "the latent and its rope key" if gains else "K and V",
        latent.seconds,
        expanded.seconds,
    )
    return gains


def _may_be(costs: Costs, route: Route, direction: Pass, settings: Settings, quick: bool) -> bool:
    """Return whether a way needs neither too many connections nor, in a search of meshes, too much memory."""
    if route.direct and len(settings.rings) > 1:
        partners = costs.partners(direction)
        if quick and route.heads > 1 and len(settings.degrees) > 1:
            return (route.size + partners) * route.heads <= FEW
        return partners <= PARTNERS
    return settings.mesh != "auto" or costs.resident_bytes(route, direction) <= MOST_RESIDENT


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector: it would cost as much as simulation, which makes no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
