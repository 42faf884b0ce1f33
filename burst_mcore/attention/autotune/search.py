"""The search over the ways to run a call: which are tried, and which a lower bound rules out."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from burst_mcore.attention.autotune.candidate import Candidate, Slower
from burst_mcore.attention.autotune.choose import AS_FAST, best
from burst_mcore.attention.autotune.costing import Costs, pairs_of
from burst_mcore.attention.autotune.ways import Mesh, Ranks, overlaps, placements, rings_of, route_for
from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

MOST_RESIDENT = 4 * 2**30
"""Bytes that a mesh may hold of other ranks, at most, to be considered by "auto"."""
PARTNERS = 2**14
"""Pairs of positions that exchange rows, at most, for a direct exchange to be considered beside rings. Every
pair is a connection, and is simulated one by one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `BurstConfig` that a search combines; of those left to it, all legal ones."""

    overlap: bool
    rings: tuple[str, ...]
    degrees: tuple[int, ...]
    """Of head parallelism."""
    directions: tuple[Pass, ...]
    placement: str = "auto"
    mesh: Mesh = "none"


@lru_cache(maxsize=64)
def candidates(
    shard: Shard,
    layout: Layout,
    mask: Mask,
    n: int,
    ranks: Ranks,
    rates: Rates,
    **settings: Any,
) -> tuple[Candidate, ...]:
    """Return every combination of ring, degree and direction with its cost; rings the faster way round.

    A direct exchange between very many pairs (`PARTNERS`) is left out where there is a ring as well. The
    second placement of head groups is left out where the first hides its communication.

    Args:
        shard: the shapes of a rank.
        layout: of the sequence.
        mask: over the sequence.
        n: tokens in the global sequence.
        ranks: where they are.
        rates: of their links and kernels.
        settings: the fields of `Settings`.
    """
    with _collector_paused():
        search = _Search(shard, layout, mask, n, ranks, rates, Settings(**settings))
        for contest in search.contests:
            if search.may_gain(contest):
                search.play(contest)
    return tuple(search.played)


@lru_cache(maxsize=64)
def contenders(
    shard: Shard,
    layout: Layout,
    mask: Mask,
    n: int,
    ranks: Ranks,
    rates: Rates,
    **settings: Any,
) -> tuple[tuple[Candidate, ...], tuple[Slower, ...]]:
    """Return the `candidates` that may be the best, and the ways that are certainly slower, with a bound.

    The best is the same as among all candidates. A way is left out only if its lower bound is above `AS_FAST`
    times the time of a way that was simulated. The arguments are those of `candidates`.
    """
    slower: dict[int, list[Slower]] = {}
    with _collector_paused():
        search = _Search(shard, layout, mask, n, ranks, rates, Settings(**settings))
        # Rings are too alike for bounds to tell them apart; beside a direct exchange bounds pay.
        sparse = any(route.direct for contest in search.contests for route, _ in contest.ways)
        contests = search.contests
        if sparse:
            contests = sorted(contests, key=lambda contest: (contest.second, contest.bound))
        for index, contest in enumerate(contests):
            if (sparse or contest.second) and contest.bound > AS_FAST * search.fastest:
                slower[index] = contest.all_slower()
                continue
            if contest.second:  # whether it may gain follows from all ways of the first placement
                for other in [i for i in slower if contests[i].comes_before(contest)]:
                    search.play(contests[other])
                    del slower[other]
            if search.may_gain(contest):
                search.play(contest)
    return tuple(search.played), tuple(way for ways in slower.values() for way in ways)


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


@dataclass(frozen=True)
class _Contest:
    """Ways that are simulated together, and the seconds that each of them takes at least."""

    costs: Costs
    ways: dict[tuple[Route, Pass], str]
    """The ring's setting, by route and backward pass."""
    second: bool
    """These ways are tried only if the others of their degree expose communication."""

    @cached_property
    def bound(self) -> float:
        return min(self.costs.at_least(route, direction) for route, direction in self.ways)

    def all_slower(self) -> list[Slower]:
        """Return the ways, not simulated."""
        return [
            Slower(ring, route.heads, route.outer, direction, self.bound)
            for (route, direction), ring in self.ways.items()
        ]

    def comes_before(self, second: _Contest) -> bool:
        """Return whether these are ways of the first placement, and `second` of the other of that degree."""
        return not self.second and self.costs.plan.heads == second.costs.plan.heads


class _Search:
    """The search over all ways to run a call, with the candidates that were simulated so far."""

    def __init__(
        self,
        shard: Shard,
        layout: Layout,
        mask: Mask,
        n: int,
        ranks: Ranks,
        rates: Rates,
        settings: Settings,
    ) -> None:
        self.played: list[Candidate] = []
        self.contests: list[_Contest] = []
        rings, mesh = settings.rings, settings.mesh
        pairs = pairs_of(layout, mask, n, ranks.size)
        tried = [(degree, placements(settings.placement, degree, ranks)) for degree in settings.degrees]
        first = [(degree, outer[0], False) for degree, outer in tried]
        second = [(degree, outer[1], True) for degree, outer in tried if len(outer) > 1]
        for degree, outer, is_second in first + second:
            hides = overlaps(settings.overlap, degree, ranks, rates)
            plan = Plan(layout, mask, n, Placement(ranks.size // degree, degree, outer))
            costs = Costs(shard, plan, pairs, ranks, rates)
            ways: dict[tuple[Route, Pass], str] = {}
            counts = rings_of(mesh, plan.placement, shard, ranks, rates)
            for count, ring, direction in itertools.product(counts, rings, settings.directions):
                route = route_for(degree, ranks, ring=ring, overlap=hides, outer=outer, rings=count)
                if ring == "flat" and "double" in rings and degree >= ranks.intra and not outer:
                    continue  # between nodes that share all heads the two are one
                if route.direct and (count > 1 or (len(rings) > 1 and costs.partners(direction) > PARTNERS)):
                    continue
                fits = mesh != "auto" or costs.resident_bytes(route, direction) <= MOST_RESIDENT
                if count == 1 or fits:
                    ways.setdefault((route, direction), ring)
            together: dict[tuple[Route, Pass | None], dict[tuple[Route, Pass], str]] = {}
            for (route, direction), ring in ways.items():
                # Both directions of a ring are played at once, at little more than one's cost.
                alone = direction if route.direct else None
                together.setdefault((route, alone), {})[route, direction] = ring
            self.contests += (
                _Contest(costs, group, is_second or (mesh == "auto" and route.rings > 1))
                for (route, _), group in together.items()
            )
        self.contests.sort(key=lambda contest: contest.second)

    def may_gain(self, contest: _Contest) -> bool:
        """Return whether another placement of head groups, or a mesh, may hide more than the first way."""
        if not contest.second:
            return True
        degree = contest.costs.plan.heads
        first = [candidate for candidate in self.played if candidate.route.heads == degree]
        return all(c.exposed_seconds > (AS_FAST - 1) * c.seconds for c in first)

    def play(self, contest: _Contest) -> None:
        costs = contest.costs
        costs.play(contest.ways)
        self.played += (
            best([costs.candidate(ring, way, direction) for way in costs.ways(route)])
            for (route, direction), ring in contest.ways.items()
        )

    @property
    def fastest(self) -> float:
        return min((candidate.seconds for candidate in self.played), default=math.inf)
