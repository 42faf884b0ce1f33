"""The choices called "auto": ring, degree of head parallelism, backward pass. Pure functions."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from burst_mcore.attention.autotune.bounds import at_least
from burst_mcore.attention.autotune.cost import (
    OURS,
    Passes,
    call_time,
    exchange_seconds,
    home_expansion_seconds,
    mean_bytes,
    message_bytes,
    slowdown_seconds,
)
from burst_mcore.attention.autotune.lockstep import Played, RoutedPass, Work, play_all
from burst_mcore.attention.autotune.simulate import play
from burst_mcore.attention.autotune.ways import Mesh, Ranks, overlaps, placements, rings_of, route_for
from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.schedule.actions import Kind, Link, Pass
from burst_mcore.attention.schedule.route import Route, schedule
from burst_mcore.attention.shard import Shard
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

AS_FAST = 1.01
"""Candidates within this factor of the fastest count as equally fast: the model is no more exact. The same
share of the time is its error for exposed communication."""
MOST_RESIDENT = 4 * 2**30
"""Bytes that a mesh may hold of other ranks, at most, to be considered by "auto"."""
MESHED = 64
"""Ranks, at most, on which "auto" considers meshes: each of them is simulated rank by rank."""
PARTNERS = 2**14
"""Pairs of positions that exchange rows, at most, for a direct exchange to be considered beside rings. Every
pair is a connection, and is simulated one by one."""


@dataclass(frozen=True)
class Candidate:
    """A way to run a call (ring, route, backward pass), and its predicted cost."""

    ring: str
    route: Route
    direction: Pass
    forward_seconds: float
    backward_seconds: float
    """Time at which the slowest rank ends."""
    compute_seconds: float
    """Time of the kernel alone, on the busiest rank."""
    intra_bytes: int
    inter_bytes: int
    """Sent in forward and backward by a rank, on average."""
    tied: int
    """Ranks that one exchange across nodes ties together; 0 where none crosses.

    A hop of the double ring ties its two ends, an all-to-all all ranks that share heads. A direct exchange
    ties all readers of one rank, if some are on another node. A ring over the ranks of several nodes ties all
    of them: they wait for its slow hop.
    """

    resident_bytes: int = 0
    """Memory that a rank of a mesh needs for rows of others that stay with it, and for their results."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        """Time in which the busiest rank's kernel does not run: communication that is not hidden."""
        return max(0.0, self.seconds - self.compute_seconds)

    @property
    def crosses_flat(self) -> bool:
        """Whether one ring goes over all ranks of several nodes."""
        return self.ring == "flat" and self.tied > 2

    def __str__(self) -> str:
        ring = f"{self.ring}{', mirrored' * self.route.mirrored}"
        ring = f"mesh of {self.route.rings} x {self.route.places}" if self.route.rings > 1 else ring
        return f"{ring}, head_parallel={self.route.heads}{' outer' * self.route.outer}, {self.direction}"


@dataclass(frozen=True)
class Slower:
    """A way that was not simulated, since a lower bound on its time is above the time of the fastest."""

    ring: str
    heads: int
    outer: bool
    direction: Pass
    at_least: float
    """Seconds."""

    def __str__(self) -> str:
        return f"{self.ring}, head_parallel={self.heads}{' outer' * self.outer}, {self.direction}"


@lru_cache(maxsize=64)
def candidates(
    shard: Shard,
    layout: Layout,
    mask: Mask,
    n: int,
    ranks: Ranks,
    rates: Rates,
    *,
    overlap: bool,
    rings: tuple[str, ...],
    degrees: tuple[int, ...],
    directions: tuple[Pass, ...],
    placement: str = "auto",
    mesh: Mesh = "none",
) -> tuple[Candidate, ...]:
    """Return every combination of ring, degree and direction with its cost; rings the faster way round.

    A direct exchange between very many pairs (`PARTNERS`) is left out where there is a ring as well. The
    second placement of head groups is left out where the first hides its communication.

    n: tokens in the global sequence.
    """
    with _collector_paused():
        search = _Search(
            shard, layout, mask, n, ranks, rates, overlap, rings, degrees, directions, placement, mesh
        )
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
    *,
    overlap: bool,
    rings: tuple[str, ...],
    degrees: tuple[int, ...],
    directions: tuple[Pass, ...],
    placement: str = "auto",
    mesh: Mesh = "none",
) -> tuple[tuple[Candidate, ...], tuple[Slower, ...]]:
    """Return the `candidates` that may be the best, and the ways that are certainly slower, with a bound.

    The best is the same as among all candidates. A way is left out only if its lower bound is above `AS_FAST`
    times the time of a way that was simulated.
    """
    slower: dict[int, list[Slower]] = {}
    with _collector_paused():
        search = _Search(
            shard, layout, mask, n, ranks, rates, overlap, rings, degrees, directions, placement, mesh
        )
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

    costs: _Costs
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
        overlap: bool,
        rings: tuple[str, ...],
        degrees: tuple[int, ...],
        directions: tuple[Pass, ...],
        placement: str,
        mesh: Mesh,
    ) -> None:
        self.played: list[Candidate] = []
        self.contests: list[_Contest] = []
        mesh = "none" if mesh == "auto" and ranks.size > MESHED else mesh
        pairs = pairs_of(layout, mask, n, ranks.size)
        tried = [(degree, placements(placement, degree, ranks)) for degree in degrees]
        first = [(degree, outer[0], False) for degree, outer in tried]
        second = [(degree, outer[1], True) for degree, outer in tried if len(outer) > 1]
        for degree, outer, is_second in first + second:
            hides = overlaps(overlap, degree, ranks, rates)
            plan = Plan(layout, mask, n, Placement(ranks.size // degree, degree, outer))
            costs = _Costs(shard, plan, pairs, ranks, rates)
            ways: dict[tuple[Route, Pass], str] = {}
            counts = rings_of(mesh, ranks.size // degree, shard)
            for count, ring, direction in itertools.product(counts, rings, directions):
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


class _Costs:
    """The costs of the passes of a call, at one degree and placement of head parallelism."""

    def __init__(self, shard: Shard, plan: Plan, pairs: Tensor, ranks: Ranks, rates: Rates) -> None:
        self.shard, self.plan, self.ranks, self.rates = shard, plan, ranks, rates
        self.pairs, self.pairs_of_keys = pairs, pairs.T.contiguous()
        self.works: dict[Pass, Work] = {}
        self.played: dict[tuple[Route, Pass], Played] = {}
        """Results by route and pass."""

    def ways(self, route: Route) -> tuple[Route, ...]:
        """Return a route both ways round, where the two differ."""
        both = route.places > 1 and not route.direct and not self.plan.everything and route.rings == 1
        return (route, replace(route, mirrored=True)) if both else (route,)

    def partners(self, direction: Pass) -> int:
        """Return the pairs of positions that exchange rows, in the pass with most."""
        readings = (self.plan.reading(of_queries=pass_ == Pass.QUERY) for pass_ in (Pass.FORWARD, direction))
        return max(int(reading.meets.sum()) for reading in readings)

    def candidate(self, ring: str, route: Route, direction: Pass) -> Candidate:
        forward, backward = self.played[route, Pass.FORWARD], self.played[route, direction]
        sent = {link: forward.sent[link] + backward.sent[link] for link in (Link.INTRA, Link.INTER)}
        return Candidate(
            ring,
            route,
            direction,
            forward.seconds + self.besides(route, Pass.FORWARD),
            backward.seconds + self.besides(route, direction),
            forward.compute + backward.compute,
            round(sent[Link.INTRA]),
            round(sent[Link.INTER]),
            self.tied(route),
            self.resident_bytes(route, direction),
        )

    def resident_bytes(self, route: Route, direction: Pass) -> int:
        """Return the bytes that a rank of a mesh holds of others: rows that stay, and their results."""
        held = []
        for pass_ in (Pass.FORWARD, direction):
            sizes = message_bytes(self.shard, route, pass_).whole
            held.append((route.of(pass_).rings - 1) * (sizes[Kind.RESIDENT] + sizes[Kind.SHARE]))
        return max(held)

    def besides(self, route: Route, pass_: Pass) -> float:
        """Return the seconds of a pass that the simulation of its schedule leaves out."""
        sizes = message_bytes(self.shard, route, pass_)
        slowed = slowdown_seconds(self.played[route, pass_].sent, self.rates) if route.overlap else 0.0
        expanded = home_expansion_seconds(self.shard, pass_, self.rates)
        return exchange_seconds(route, sizes, self.rates) + slowed + expanded

    def play(self, ways: Iterable[tuple[Route, Pass]]) -> None:
        """Simulate the passes of these ways, and of their rings the other way round."""
        wanted: dict[tuple[Route, Pass], RoutedPass] = {}
        for route, direction in ways:
            for way, pass_ in itertools.product(self.ways(route), (Pass.FORWARD, direction)):
                if (way, pass_) in self.played:
                    continue
                # Not hidden: messages take the cores that compute.
                played = way if self.rates.hidden else replace(way, overlap=False)
                sizes = message_bytes(self.shard, route, pass_)
                work = self.work(route, pass_)
                wanted.setdefault((way, pass_), RoutedPass(played, pass_, sizes, work))
        at_once = {key: routed for key, routed in wanted.items() if self.in_lockstep(routed)}
        played_all = play_all(self.plan, [*at_once.values()], self.ranks.intra, self.rates)
        self.played |= zip(at_once, played_all, strict=True)
        for key, routed in wanted.items():
            if key not in at_once:
                self.played[key] = self.one_by_one(routed)

    def at_least(self, route: Route, direction: Pass) -> float:
        """Return the seconds that the faster way round takes at least, forward and backward."""
        return min(
            sum(
                at_least(
                    pass_,
                    way,
                    self.plan.reading(of_queries=pass_ == Pass.QUERY),
                    self.work(route, pass_),
                    message_bytes(self.shard, route, pass_),
                    self.ranks.intra,
                    self.rates,
                )
                for pass_ in (Pass.FORWARD, direction)
            )
            for way in self.ways(route)
        )

    def work(self, route: Route, pass_: Pass) -> Work:
        if pass_ not in self.works:
            pairs = self.pairs_of_keys if pass_ == Pass.QUERY else self.pairs
            self.works[pass_] = work_of(self.shard, pairs, route, pass_, self.rates)
        return self.works[pass_]

    def in_lockstep(self, routed: RoutedPass) -> bool:
        if routed.route.rings > 1:
            return False
        meets = self.plan.reading(of_queries=routed.of_queries).meets
        return not routed.route.direct or bool(meets.all())

    def one_by_one(self, routed: RoutedPass) -> Played:
        drawn = schedule(routed.route, routed.pass_, self.plan)
        timeline = play(drawn, routed.sizes, routed.work.of_action, self.ranks.intra, self.rates)
        sent = mean_bytes(drawn.programs, routed.sizes, self.ranks.intra)
        busiest = routed.work.busiest_of(routed.route.of(routed.pass_).rings)
        return Played(timeline.seconds, busiest, sent)

    def tied(self, route: Route) -> int:
        """Return `Candidate.tied` of a route."""
        if self.ranks.size == self.ranks.intra:
            return 0
        intra = self.ranks.intra
        of_heads = 0 if not route.outer and intra % route.heads == 0 else route.heads
        if route.positions == 1:
            return of_heads
        if route.direct:
            reads = self.plan.reading(of_queries=False).meets
            node = route.placement.rank(torch.arange(len(reads)), 0) // intra
            across = (reads & (node[:, None] != node)).any(1)
            return max(of_heads, int((reads.sum(1) * across).max()))
        if route.rings > 1:  # a column, or its turn in backward, crosses the nodes
            return max(of_heads, *(shape.rings for shape in route.shapes))
        if intra % route.span == 0 and route.nodes == 1:
            return of_heads
        every_rank_hops = route.nodes > 1 or (not route.outer and route.heads % intra == 0)
        return max(of_heads, 2 if every_rank_hops else self.ranks.size)


@lru_cache(maxsize=4)
def pairs_of(layout: Layout, mask: Mask, n: int, ranks: int) -> Tensor:
    """Return the query-key pairs of each rank's queries and each rank's keys, [ranks, ranks]. Cached."""
    return pairs_between(layout, mask, n, ranks)


def work_of(
    shard: Shard, pairs: Tensor, route: Route, pass_: Pass, rates: Rates, passes: Passes = OURS
) -> Work:
    """Return the seconds of kernel calls in a pass; pairs: of rows that stay and travel, [ranks, ranks]."""
    pooled = shard.pooled(route.heads)
    return Work(pairs, route.placement, call_time(pooled, pass_, rates, passes), pooled.tokens)


def best(costed: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate; among equally fast ones (`AS_FAST`) the first in the order of ties.

    First comes least exposed communication, as far as the model can tell. Then come fewest ranks tied
    together by an exchange across nodes, and no ring over all; then fewest bytes between nodes, and within.
    The simplest comes last.
    """
    fastest = min(candidate.seconds for candidate in costed)
    as_fast = [c for c in costed if c.seconds <= AS_FAST * fastest]
    exposed = min(c.exposed_seconds for c in as_fast) + (AS_FAST - 1) * fastest

    def order(c: Candidate) -> tuple[float, ...]:
        across, route = (c.tied, c.crosses_flat, c.inter_bytes), c.route
        return (
            *across,
            c.intra_bytes,
            route.rings,
            route.direct,
            route.heads,
            route.outer,
            _second(c),
            route.mirrored,
        )

    return min((c for c in as_fast if c.exposed_seconds <= exposed), key=order)


def _second(candidate: Candidate) -> bool:
    """Return whether the other direction is better where all else is equal.

    Ties go to "query", the paper's choice, except on a ring of one: there "kv" can start before all of dO has
    arrived.
    """
    return (candidate.direction == Pass.QUERY) == (candidate.route.positions == 1)


def reason(chosen: Candidate, costed: Sequence[Candidate], slower: Sequence[Slower] = ()) -> str:
    """Say why a candidate was chosen; slower: the ways that were not simulated."""
    if chosen.seconds == 0:
        return "nothing is to be done"
    bound = chosen.compute_seconds / chosen.seconds
    kernel_share = f"{bound:.0%} of its {chosen.seconds:.3g} s is kernel time"
    others = [c for c in costed if c is not chosen]
    if not others and slower:
        least = min(way.at_least for way in slower) / chosen.seconds
        return f"fastest: every other way takes at least {least - 1:.0%} longer; {kernel_share}"
    if not others:
        return f"the only one; {kernel_share}"
    rival = min(others, key=lambda c: c.seconds)
    ratio = rival.seconds / chosen.seconds
    if ratio > AS_FAST:
        return f"fastest: the next, {rival}, takes {ratio - 1:.0%} longer; {kernel_share}"
    if ratio >= 1:
        return f"fastest, with {rival} {ratio - 1:.2%} behind; {_saved(chosen, rival)}; {kernel_share}"
    return (
        f"as fast as {rival} ({1 / ratio - 1:.2%} slower, which the model cannot tell); "
        f"{_saved(chosen, rival)}; {kernel_share}"
    )


def _saved(chosen: Candidate, rival: Candidate) -> str:
    """Say what an equally fast candidate saves beside another, and how much."""
    saved = []
    if chosen.exposed_seconds < rival.exposed_seconds:
        less = rival.exposed_seconds - chosen.exposed_seconds
        saved.append(f"exposes {less * 1e3:.3g} ms less communication")
    if chosen.tied < rival.tied:
        saved.append(f"ties {chosen.tied} ranks together across nodes instead of {rival.tied}")
    for link, ours, theirs in (
        ("between nodes", chosen.inter_bytes, rival.inter_bytes),
        ("within nodes", chosen.intra_bytes, rival.intra_bytes),
    ):
        if ours < theirs:
            saved.append(f"moves {1 - ours / theirs:.0%} fewer bytes {link}")
    return f"it {', '.join(saved)}" if saved else "it is the simpler"


@lru_cache(maxsize=256)
def typical(layout: Layout, mask: Mask, n: int, size: int) -> tuple[Layout, Mask]:
    """Return the representative of a kind of layout and mask: the choice for it holds for the whole kind.

    Documents are replaced by others, the same for all of a kind. They are about as long as a typical token's
    document, to a power of two. Their lengths differ, so that they end anywhere in a rank's share, as real
    ones do. The chunks of a layout that was made for documents are dealt in turn.
    """
    ends = mask.document_ends
    if ends is None:
        return layout, mask
    lengths = ends.diff().double()
    length = min(n, 2 ** round(float(((lengths**2).sum() / lengths.sum()).log2())))
    if layout.kind == "zigzag-documents":
        length = max(1, round(length / (2 * size))) * 2 * size
        even = torch.tensor([*range(0, n, length), n])
        return Layout("zigzag-documents", ends=tuple(even.tolist())), mask.with_documents(even)
    if layout.kind == "chunks":
        dealt = size * len(layout.chunks[0])
        layout = Layout("chunks", chunks=tuple(tuple(range(r, dealt, size)) for r in range(size)))
    return layout, mask.with_documents(_uneven(n, length))


def _uneven(n: int, length: int) -> Tensor:
    """Return cu_seqlens of documents of half to one and a half times `length`; always the same."""
    several = torch.randint(length // 2, length + length // 2 + 1, (2 * n // length + 2,),
                            generator=torch.Generator().manual_seed(0))  # fmt: skip
    ends = several.clamp(min=1).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < n], torch.tensor([n])])
