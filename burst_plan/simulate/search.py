"""The search over the candidates of a call: one pass, which leaves out candidates that cannot be the best."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

from burst_mcore.attention.choose import (
    AS_FAST,
    Candidate,
    Family,
    Question,
    Settings,
    best,
    decide,
    routes,
    settings_of,
)
from burst_mcore.attention.choose import candidates as counted_candidates
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import RINGS, BurstConfig
from burst_plan.simulate.costing import Costs

PARTNERS = 2**14
"""Most pairs of ring ranks that exchange rows for which a direct exchange is compared with rings. Every
pair is a connection, and is simulated one by one."""
NEAR, FAR = 1.25, 1.1
"""Limits of a candidate on many ranks: `NEAR` times the rule's best seconds, `FAR` times the least kernel
seconds of the simulated candidates."""
MANY = 64
"""Ranks up to which a search takes every candidate that settings allow. Beyond, it leaves out far candidates,
flat rings in addition to double rings, and direct exchanges with shared heads of over `FEW` messages."""
FEW = 2**10


@lru_cache(maxsize=64)
def candidates(question: Question, settings: Settings, *, every: bool = True) -> tuple[Candidate, ...]:
    """Return the candidates by ring, degree and direction with their costs; rings in the better direction.

    A direct exchange between very many pairs (`PARTNERS`) is left out where there is a ring as well.

    Args:
        every: False leaves out routes that cannot change what is the best (`_matters`).
    """
    many = question.ranks.size > MANY
    near = _near(question, settings) if many else None
    costs_at = lru_cache(maxsize=1 if many else None)(partial(Costs, question))  # of 40 MB on 1,024 ranks
    costed: list[Candidate] = []
    with _collector_paused():
        words = {
            route: word for route, word in routes(question, settings).items() if near is None or route in near
        }
        family = {route: Family.of(route, question.ranks.intra) for route in words}
        least = {x: min(costs_at(x.placement).least(x, side) for side in settings.directions) for x in words}
        limit = AS_FAST * min(least.values(), default=0.0)
        waiting = sorted(words, key=lambda x: (least[x] > limit, family[x], least[x]))
        while route := next((x for x in waiting if every or _matters(family[x], least[x], costed)), None):
            waiting.remove(route)
            costs = costs_at(route.placement)
            fastest_yet = min((each.seconds for each in costed), default=math.inf)
            sides = [
                side
                for side in (settings.directions if near is None else near[route])
                if _may_be(costs, route, side, settings, quick=many and not every)
                and not (many and costs.least(route, side) > FAR * fastest_yet)
            ]
            limit = math.inf if every else AS_FAST * fastest_yet
            costed += (
                best([costs.candidate(words[route], each, side) for each in costs.mirrors(route)])
                for side in costs.play(route, sides, limit)
            )
    return tuple(costed)


def _near(question: Question, settings: Settings) -> dict[Route, list[Pass]]:
    """Return the candidates that the rule counts within `NEAR` of its best: a route's directions."""
    options = counted_candidates(question, settings)
    limit = NEAR * min(each.seconds for each in options)
    near: dict[Route, list[Pass]] = {}
    for each in options:
        if each.seconds <= limit:
            sides = near.setdefault(replace(each.route, mirrored=False), [])
            sides += [each.direction] * (each.direction not in sides)
    return near


def _matters(family: Family, least: float, costed: Sequence[Candidate]) -> bool:
    """Return whether a route whose seconds are at least `least` may change the best candidate.

    It does not if it is too slow, or if the best is simpler and as fast as the route could be.
    """
    if not costed:
        return True
    choice, limit = best(costed), AS_FAST * min(each.seconds for each in costed)
    return least <= limit and (family <= choice.family or AS_FAST * least < choice.seconds)


def costed(
    config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None
) -> tuple[Candidate, ...]:
    """Return the candidates of a configuration with their costs: flat rings too, which no call searches.

    On more than `MANY` ranks only candidates near the rule's best are simulated, and flat rings only alone.

    degrees: degrees of head parallelism to try; default: all that the configuration allows.
    """
    settings = settings_of(config, question, degrees)
    rings = RINGS[1:] if config.ring == "auto" and question.ranks.size <= MANY else settings.rings
    return candidates(question, settings._replace(rings=rings))


def tried(config: BurstConfig, question: Question) -> tuple[Candidate, ...]:
    """Return the candidates for the best, with their costs; the layout of `config` is not used."""
    return candidates(question, settings_of(config, question), every=False)


def fastest(config: BurstConfig, question: Question) -> Candidate:
    """Return the best candidate by simulation; the layout of `config` is not used."""
    return best(tried(config, question))


def taken(config: BurstConfig, question: Question, known: Sequence[Candidate] = ()) -> Candidate:
    """Return the candidate that a call takes by its rule, simulated; the layout of `config` is not used.

    known: candidates that were simulated before.
    """
    route, direction, _ = decide(config, question)
    for each in known:
        if (each.route, each.direction) == (route, direction):
            return each
    costs = Costs(question, route.placement)
    one_way = replace(route, mirrored=False)
    costs.simulate(one_way, [Pass.FORWARD, direction], math.inf)
    ring = routes(question, settings_of(config, question))[one_way]
    return costs.candidate(ring, route, direction)


def _may_be(costs: Costs, route: Route, direction: Pass, settings: Settings, *, quick: bool) -> bool:
    """Return whether a candidate needs few enough connections."""
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
