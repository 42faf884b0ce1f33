"""The search over the ways to run a call: one pass, from the plainest way on."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial

from burst_mcore.attention.autotune.candidate import Candidate, Word
from burst_mcore.attention.autotune.choose import AS_FAST, best
from burst_mcore.attention.autotune.costing import Costs
from burst_mcore.attention.autotune.question import Question
from burst_mcore.attention.autotune.ways import Mesh, overlaps, placements, rings_of, route_for
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route

MOST_RESIDENT = 4 * 2**30
"""Bytes that a mesh may hold of other ranks, at most, to be considered where meshes are searched."""
PARTNERS = 2**14
"""Pairs of positions that exchange rows, at most, for a direct exchange to be considered beside rings. Every
pair is a connection, and is simulated one by one."""
MANY = 64
"""Ranks up to which a call tries all direct exchanges. Beyond, it tries the side of the best way so far,
and no shared heads beside unless their degree is set: rank by rank, 1024 ranks would take a minute."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `BurstConfig` that a search combines; of those left to it, all that are tried."""

    overlap: bool
    rings: tuple[str, ...]
    degrees: tuple[int, ...]
    """Of head parallelism."""
    directions: tuple[Pass, ...]
    placement: str = "auto"
    mesh: Mesh = "none"


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
    tried = routes(question, settings)
    with _collector_paused():
        for word in sorted({word for word, _, _ in tried}):
            for _, route, ring in (each for each in tried if each[0] == word):
                costs = costs_at(route.placement)
                sides = settings.directions
                if route.direct and costed and not every and question.ranks.size > MANY:
                    alone = route.heads == 1 or len(settings.degrees) == 1
                    sides = (best(costed).direction,) if alone else ()
                ways = [(route, side) for side in sides if _may_be(costs, route, side, settings)]
                costs.play(ways)  # both directions at once, at little more than one's cost
                costed += (
                    best([costs.candidate(ring, way, direction) for way in costs.ways(route)])
                    for _, direction in ways
                )
            if not every and costed and best(costed).seconds <= AS_FAST * costs.least:
                break
    return tuple(costed)


def routes(question: Question, settings: Settings) -> list[tuple[Word, Route, str]]:
    """Return the routes that settings allow, each with its kind and its ring's word."""
    ranks, words = question.ranks, dict[Route, str]()
    for degree in settings.degrees:
        hides = overlaps(settings.overlap, degree, ranks, question.rates)
        ways = itertools.product(
            placements(settings.placement, degree, ranks),
            rings_of(settings.mesh, ranks.size // degree),
            settings.rings,
        )
        for outer, rings, ring in ways:
            if ring == "flat" and "double" in settings.rings and degree >= ranks.intra and not outer:
                continue  # between nodes that share all heads the two are one
            if ring != "direct" or rings == 1:
                route = route_for(degree, ranks, ring=ring, overlap=hides, outer=outer, rings=rings)
                words.setdefault(route, ring)
    return [(Word.of(route, ranks.intra), route, ring) for route, ring in words.items()]


def _may_be(costs: Costs, route: Route, direction: Pass, settings: Settings) -> bool:
    """Return whether a way needs neither too many connections nor, in a search of meshes, too much memory."""
    if route.direct and len(settings.rings) > 1:
        return costs.partners(direction) <= PARTNERS
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
