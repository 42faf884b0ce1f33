"""The search over the ways to run a call: one pass, which leaves out ways that cannot be the best."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial

from burst_mcore.attention.candidates import RINGS, Family, Question, Settings, routes, settings_of
from burst_mcore.attention.choose import AS_FAST, Candidate, best, decide
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import BurstConfig
from burst_plan.simulate.costing import Costs

PARTNERS = 2**14
"""Pairs of positions that exchange rows, at most, for a direct exchange to be considered beside rings. Every
pair is a connection, and is simulated one by one."""
MANY = 64
"""Ranks up to which a call tries all direct exchanges. Beyond, it first tries the side with fewer bytes,
and beside shared heads only `FEW` messages unless their degree is set: 1024 ranks would take a minute."""
FEW = 2**10
"""Messages of a direct exchange with shared heads, at most, in the search of a call on many ranks."""


@lru_cache(maxsize=64)
def candidates(question: Question, settings: Settings, *, every: bool = True) -> tuple[Candidate, ...]:
    """Return every combination of ring, degree and direction with its cost; rings the better way round.

    A direct exchange between very many pairs (`PARTNERS`) is left out where there is a ring as well.

    Args:
        every: False leaves out routes that cannot change what is the best (`_matters`).
    """
    costs_at, words = cache(partial(Costs, question)), routes(question, settings)
    quick = not every and question.ranks.size > MANY
    costed: list[Candidate] = []
    with _collector_paused():
        least, family = {}, {route: Family.of(route, question.ranks.intra) for route in words}
        for each in words:
            least[each] = min(costs_at(each.placement).least(each, side) for side in settings.directions)
        near = AS_FAST * min(least.values(), default=0.0)
        first = {route: quick and route.direct for route in words}
        waiting = sorted(words, key=lambda x: (not first[x], least[x] > near, family[x], least[x]))
        while route := next((x for x in waiting if every or _matters(family[x], least[x], costed)), None):
            waiting.remove(route)
            costs, sides = costs_at(route.placement), settings.directions
            if first[route] and len(words) > 1:
                sides = (min(sides, key=partial(costs.moved, route)),)
            sides = tuple(side for side in sides if _may_be(costs, route, side, settings, quick))
            limit = math.inf if every or not costed else AS_FAST * min(each.seconds for each in costed)
            costed += (
                best([costs.candidate(words[route], way, side) for way in costs.ways(route)])
                for side in costs.play(route, sides, limit)
            )
    return tuple(costed)


def _matters(family: Family, least: float, costed: Sequence[Candidate]) -> bool:
    """Return whether a route that takes at least so many seconds may change which way is the best.

    It may not where it takes too long, or where the best is plainer and as fast as the route could be.
    """
    if not costed:
        return True
    chosen, limit = best(costed), AS_FAST * min(each.seconds for each in costed)
    return least <= limit and (family <= chosen.family or AS_FAST * least < chosen.seconds)


def costed(
    config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None
) -> tuple[Candidate, ...]:
    """Return every way that a configuration allows, with its cost: flat rings, too, which "auto" never takes.

    degrees: those of head parallelism to try; default all that the configuration allows.
    """
    settings = settings_of(config, question, degrees)
    rings = RINGS if config.ring == "auto" else settings.rings
    return candidates(question, replace(settings, rings=rings))


def tried(config: BurstConfig, question: Question) -> tuple[Candidate, ...]:
    """Return the ways that may be the best, with their costs; the layout of `config` is not used."""
    return candidates(question, settings_of(config, question), every=False)


def fastest(config: BurstConfig, question: Question) -> Candidate:
    """Return the best way by simulation; the layout of `config` is not used."""
    return best(tried(config, question))


def taken(config: BurstConfig, question: Question) -> Candidate:
    """Return the way that a call takes by its rule, simulated; the layout of `config` is not used."""
    route, direction, _ = decide(config, question)
    settings = settings_of(config, question)
    word = next(word for way, word in routes(question, settings).items() if _same(way, route))
    costs = Costs(question, route.placement)
    costs.simulate(replace(route, mirrored=False), [Pass.FORWARD, direction], math.inf)
    return costs.candidate(word, route, direction)


def _same(way: Route, other: Route) -> bool:
    """Return whether two routes are one, whichever way round a ring goes."""
    return replace(way, mirrored=other.mirrored) == other


def _may_be(costs: Costs, route: Route, direction: Pass, settings: Settings, quick: bool) -> bool:
    """Return whether a way does not need too many connections."""
    if route.direct and len(settings.rings) > 1:
        partners = costs.partners(direction)
        if quick and route.heads > 1 and len(settings.degrees) > 1:
            return (route.size + partners) * route.heads <= FEW
        return partners <= PARTNERS
    return True


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
