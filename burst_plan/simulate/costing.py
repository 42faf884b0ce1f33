"""Costs of a call's candidates at one degree of head parallelism: simulated passes, plus fixed seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from torch import Tensor

from burst_mcore.attention.choose import Candidate, Family, Question, expansion_seconds, kernel_seconds
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.geometry.shard import Placement, Shard
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.route import Route, schedule
from burst_mcore.rates import Rates
from burst_plan.simulate.cost import (
    exchange_seconds,
    host_seconds,
    mean_bytes,
    message_bytes,
    slowdown_seconds,
)
from burst_plan.simulate.lockstep import KernelWork, PlayedPass, RoutedPass, play_all
from burst_plan.simulate.play import play


class Costs:
    """The costs of the passes of a call, at one degree and placement of head parallelism."""

    def __init__(self, question: Question, placement: Placement) -> None:
        self.shard, self.ranks, self.rates = question.shard, question.ranks, question.rates
        self.plan = Plan(question.layout, question.mask, question.n, placement)
        self.pairs = pairs_of(question.layout, question.mask, question.n, question.ranks.size)
        self.pairs_of_keys = self.pairs.T.contiguous()
        self.works: dict[Pass, KernelWork] = {}
        self.played: dict[tuple[Route, Pass], PlayedPass] = {}
        """Results by route and pass."""

    def mirrors(self, route: Route) -> tuple[Route, ...]:
        """Return a route in both ring directions, if the two differ."""
        has_two = route.has_mirror and not self.plan.everything
        return (route, replace(route, mirrored=True)) if has_two else (route,)

    def partners(self, direction: Pass) -> int:
        """Return the number of ring-rank pairs that exchange rows, in the pass with the most."""
        readings = (self.plan.reading(of_queries=pass_ == Pass.QUERY) for pass_ in (Pass.FORWARD, direction))
        return max(int(reading.meets.sum()) for reading in readings)

    def candidate(self, ring: str, route: Route, direction: Pass) -> Candidate:
        forward, backward = self.played[route, Pass.FORWARD], self.played[route, direction]
        seconds = self.seconds(route, Pass.FORWARD), self.seconds(route, direction)
        intra, inter = (round(forward.sent[link] + backward.sent[link]) for link in (Link.INTRA, Link.INTER))
        kernel, family = forward.compute + backward.compute, Family.of(route, self.ranks.intra)
        return Candidate(ring, route, direction, *seconds, kernel, intra, inter, family)

    def least(self, route: Route, direction: Pass) -> float:
        """Return a candidate's seconds in its better ring direction: a lower bound until it is simulated."""
        passes = (Pass.FORWARD, direction)
        return min(sum(self.seconds(way, pass_) for pass_ in passes) for way in self.mirrors(route))

    def seconds(self, route: Route, pass_: Pass) -> float:
        """Return the seconds of a pass: the larger of the device's and the host's.

        Before a pass is simulated, this is its time with instant messages.
        """
        work = self.work(route, pass_)
        played = self.played.get((route, pass_)) or PlayedPass(work.busiest, work.busiest, {})
        # The device's seconds that the simulation of a schedule leaves out:
        device = played.seconds
        device += exchange_seconds(route, message_bytes(self.shard, route, pass_), self.rates)
        if route.overlap:
            device += slowdown_seconds(played.sent, self.rates)
        if not self.shard.latent_rotates or pass_ == Pass.QUERY:
            device += self.shard.tokens * expansion_seconds(self.shard, pass_, self.rates)
        host = host_seconds(work.calls, 2 * (route.heads > 1), self.rates)
        return max(device, host)

    def play(self, route: Route, directions: Sequence[Pass], limit: float = math.inf) -> list[Pass]:
        """Simulate a route's passes in both ring directions; return the directions that may end in time.

        limit: seconds. A candidate that takes longer is dropped as soon as that is known. Without a limit all
            passes are simulated at once, at little more than the cost of one.
        """
        stages = [(Pass.FORWARD,), directions] if limit < math.inf else [(Pass.FORWARD, *directions)]
        for passes in stages:
            directions = [each for each in directions if self.least(route, each) <= limit]
            now = [each for each in passes if each in (Pass.FORWARD, *directions)]
            others = {Pass.FORWARD, *directions}.difference(now) or now
            rest = min(self.seconds(way, each) for way in self.mirrors(route) for each in others)
            if directions:
                self.simulate(route, now, limit - rest)
        return [each for each in directions if self.least(route, each) < math.inf]

    def simulate(self, route: Route, passes: Sequence[Pass], limit: float) -> None:
        """Simulate passes of a route, in both ring directions."""
        requests: dict[tuple[Route, Pass], RoutedPass] = {}
        for way, pass_ in itertools.product(self.mirrors(route), passes):
            # Not hidden: messages take the multiprocessors that compute.
            variant = way if self.rates.hidden else replace(way, overlap=False)
            sizes = message_bytes(self.shard, route, pass_)
            requests[way, pass_] = RoutedPass(variant, pass_, sizes, self.work(route, pass_))
        together = {key: request for key, request in requests.items() if self.in_lockstep(request)}
        results = play_all(self.plan, [*together.values()], self.ranks.intra, self.rates, limit)
        self.played |= zip(together, results, strict=True)
        for key, request in requests.items():
            if key not in together:
                self.played[key] = self.one_by_one(request)

    def work(self, route: Route, pass_: Pass) -> KernelWork:
        if pass_ not in self.works:
            pairs = self.pairs_of_keys if pass_ == Pass.QUERY else self.pairs
            self.works[pass_] = work_of(self.shard, pairs, route, pass_, self.rates)
        return self.works[pass_]

    def in_lockstep(self, request: RoutedPass) -> bool:
        reading = self.plan.reading(of_queries=request.of_queries)
        return not request.route.direct or bool(reading.meets.all())

    def one_by_one(self, request: RoutedPass) -> PlayedPass:
        drawing = schedule(request.route, request.pass_, self.plan)
        timeline = play(drawing, request.sizes, request.work.of_action, self.ranks.intra, self.rates)
        volumes = mean_bytes(drawing.programs, request.sizes, self.ranks.intra)
        return PlayedPass(timeline.seconds, request.work.busiest, volumes)


pairs_of = lru_cache(maxsize=4)(pairs_between)
"""The query-key pairs of a layout by rank of queries and rank of keys, [ranks, ranks]. Cached."""


def work_of(shard: Shard, pairs: Tensor, route: Route, pass_: Pass, rates: Rates) -> KernelWork:
    """Return the seconds of kernel calls in a pass; pairs: of staying by rotating rows, [ranks, ranks]."""
    seconds = partial(kernel_seconds, shard.pooled(route.heads), pass_, rates)
    return KernelWork(pairs, route.placement, seconds)
