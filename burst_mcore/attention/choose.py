"""The rule by which a call runs: the plainest of the candidates with the best lower bound of time.

The bound of a pass is the sum over its steps of max(kernel seconds, message seconds). A message starts when
both of its ends have reached its step. Pairs and bytes are counted from the plan's remote rows, without a
simulation. `burst_plan` simulates the same candidates, and prints the loss of the rule.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.candidates import (
    Family,
    Question,
    Settings,
    expansion_seconds,
    kernel_seconds,
    routes,
    settings_of,
)
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.reading import Reading, pairs_between
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.schedule.actions import Kind, Pass
from burst_mcore.attention.schedule.ring import visits
from burst_mcore.attention.schedule.route import PASSES, Route, message_bytes
from burst_mcore.config import BurstConfig

logger = logging.getLogger("burst_mcore")

AS_FAST = 1.05
"""Candidates within this factor of the fastest count as equally fast: the model's median error is 6.6 %."""
COPIES = 4
"""Memory accesses for a byte of an all-to-all: packed and unpacked, each read and written."""


@dataclass(frozen=True)
class Candidate:
    """A plan of a call (ring, route, backward pass), and its predicted cost."""

    ring: str
    route: Route
    direction: Pass
    forward_seconds: float
    backward_seconds: float
    """Seconds until the slowest rank ends."""
    compute_seconds: float
    """Seconds of the kernel alone, on the busiest rank."""
    intra_bytes: int
    inter_bytes: int
    """Mean bytes that a rank sends in forward and backward."""
    family: Family

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        ring = f"{self.ring}{', mirrored' * self.route.mirrored}"
        return f"{ring}, head_parallel={self.route.heads}{' outer' * self.route.outer}, {self.direction}"


def best(costed: Sequence[Candidate]) -> Candidate:
    """Return the plainest of the candidates that are as fast as the fastest (`AS_FAST`).

    A ring is plainer than head parallelism within a node; then come a direct exchange and head parallelism
    across nodes (`Family`). A double ring is plainer than a flat ring. A tie goes to the fewest bytes between
    nodes, then within nodes. So backward sends the side with fewer bytes; at a tie queries, the paper's
    choice. A causal ring is mirrored: more rows stay at home, and peak memory is lower.
    """
    fastest = min(candidate.seconds for candidate in costed)
    return min((c for c in costed if c.seconds <= AS_FAST * fastest), key=_order)


def _order(c: Candidate) -> tuple[float, ...]:
    route = c.route
    # On a ring of one rank "kv" can start before all of dO has arrived.
    second = (c.direction == Pass.QUERY) == (route.ring_size == 1)
    bytes_sent = c.inter_bytes, c.intra_bytes
    return (c.family, c.ring == "flat", *bytes_sent, route.heads, route.outer, second, route.mirrored)


class Decision(NamedTuple):
    """The chosen route and options of a call."""

    route: Route
    direction: Pass
    latent_rotates: bool


def decide(config: BurstConfig, question: Question, rotates: str = "off") -> Decision:
    """Return the decision for a call, made and logged once for each kind of question.

    Args:
        rotates: `Latent.rotates`; ignored without a latent.
    """
    rotates = rotates if question.shard.latent is not None else "off"
    return _of_kind(question.typical, settings_of(config, question), rotates)


@lru_cache(maxsize=256)
def _of_kind(question: Question, settings: Settings, rotates: str) -> Decision:
    route, *others = routes(question, settings)
    direction, *sides = settings.directions
    if question.ranks.size == 1 or not (others or sides or route.has_mirror or rotates == "auto"):
        return Decision(route, direction, rotates == "on")
    forms = [question.with_latent(each) for each in (False, True) if rotates in ("auto", ("off", "on")[each])]
    bests = [best(candidates(each, settings)) for each in forms]
    latent = bests[-1]  # chosen if it is not slower than K and V, and `best` prefers it
    gains = rotates == "auto" and latent.seconds <= bests[0].seconds and best(bests) is latent
    plan = latent if gains else bests[0]
    times = 1e3 * plan.seconds, 1e3 * plan.compute_seconds
    logger.info("%s, backward %s: counted %.1f ms, kernel %.1f ms", plan.route, plan.direction, *times)
    return Decision(plan.route, plan.direction, gains or rotates == "on")


def candidates(question: Question, settings: Settings) -> list[Candidate]:
    """Return all candidates of the settings, rings in both directions, with counted seconds and bytes."""
    short, intra, costed = question.shortened(settings.degrees), question.ranks.intra, list[Candidate]()
    pairs = pairs_between(short.layout, short.mask, short.n, short.ranks.size)
    # With windows the additional steps of a longer ring only carry messages.
    longer = 1.0 if question.reach is None else question.ranks.size / short.ranks.size
    counts_of = cache(partial(_Counts, short, pairs, longer))
    both = zip(routes(short, settings).items(), routes(question, settings), strict=True)
    for (route, ring), whole in both:
        counts = counts_of(route.placement)
        count_pass = cache(partial(_Counted, counts))
        turns = (False, True) if route.has_mirror and not counts.plan.everything else (False,)
        for side, turn in itertools.product(settings.directions, turns):
            variant = replace(route, mirrored=turn)
            forward_pass, backward_pass = count_pass(variant, Pass.FORWARD), count_pass(variant, side)
            within, between = (forward_pass.sent + backward_pass.sent).tolist()
            candidate = Candidate(
                ring=ring,
                route=replace(whole, mirrored=turn),
                direction=side,
                forward_seconds=forward_pass.seconds,
                backward_seconds=backward_pass.seconds,
                compute_seconds=forward_pass.busiest + backward_pass.busiest,
                intra_bytes=round(within),
                inter_bytes=round(between),
                family=Family.of(whole, intra),
            )
            costed.append(candidate)
    return costed


class _Counts:
    """The counted work and remote rows of each pair of ring ranks.

    Attributes:
        pairs: query-key pairs, [ring ranks, members, ring ranks, members].
        read: the number of remote rows, [owners, readers]; of keys, then of queries.
    """

    def __init__(self, question: Question, pairs: Tensor, longer: float, placement: Placement) -> None:
        self.question, self.placement, self.longer = question, placement, longer
        self.plan = plan_of(question.layout, question.mask, question.n, placement)
        ring_rank, member = torch.arange(placement.ring_size)[:, None], torch.arange(placement.heads)
        ranks = placement.rank(ring_rank, member)
        self.pairs = pairs[ranks[:, :, None, None], ranks]
        self.read = [self._rows(self.plan.reading(of_queries=each)) for each in (False, True)]

    def _rows(self, reading: Reading) -> Tensor:
        rows = torch.zeros(reading.size, reading.size, dtype=torch.float64)
        return rows.index_add_(0, reading.owner, reading.read.T * reading.length[:, None].double())


class _Counted:
    """The seconds of a pass over a route, and the bytes that a rank sends."""

    def __init__(self, counts: _Counts, route: Route, pass_: Pass) -> None:
        question, self.placement, of_queries = counts.question, counts.placement, pass_ == Pass.QUERY
        shard, self.rates, self.intra = question.shard, question.rates, question.ranks.intra
        self.route, self.moves, pooled = route, PASSES[pass_], shard.pooled(route.heads)
        self.longer = counts.longer
        self.overlap = route.overlap and self.rates.hidden  # else messages take the cores that compute
        self.size = message_bytes(shard, route, pass_)
        self.sent = torch.zeros(2, dtype=torch.float64)
        """Bytes within nodes, and between nodes."""
        self.here = torch.arange(route.ring_size)
        self.rank = self.placement.rank(self.here, 0)
        self.node = self.rank // self.intra
        self.read = counts.read[of_queries].clone().fill_diagonal_(0) / counts.plan.rows
        """The remote shares of rotating blocks, [owners, readers]."""
        pairs = (counts.pairs.permute(2, 3, 0, 1) if of_queries else counts.pairs).sum(3)
        self.work = kernel_seconds(pooled, pass_, self.rates, pairs.sum(1))
        """Seconds of the kernel, [ring ranks, sources]."""
        self.by_member = kernel_seconds(pooled, pass_, self.rates, pairs).sum(1)
        """The same, with staying rows computed member by member."""
        self.busiest = float(self.work.sum(1).max())
        device = float((self._direct() if route.direct else self._ring()).max())
        device += self._exchange(Kind.ROTATING_IN) + self._exchange(Kind.ROTATING_OUT)
        if route.overlap:  # messages slow concurrent kernels down
            links = torch.tensor([self.rates.link(inter=False), self.rates.link(inter=True)])
            device += self.rates.slowdown * float((self.sent / links).sum())
        if not shard.latent_rotates or of_queries:
            device += shard.tokens * expansion_seconds(shard, pass_, self.rates)
        calls = int((self.work > 0).sum(1).max()) + 2 * (route.heads > 1)
        self.seconds = max(device, calls * self.rates.call)  # the host runs ahead

    def _transfer(self, source: Tensor, size: Tensor, members: int = 0) -> Tensor:
        """Return the seconds of messages from these ring ranks, by their bytes; -inf without a message."""
        inter = self.node[source] != self.node
        self.sent += torch.stack([size * ~inter, size * inter]).mean(-1).view(2, -1).sum(1)
        within = torch.full(inter.shape, 1 / self.rates.link(inter=False), dtype=torch.float64)
        for group, rate in self.rates.levels:
            crosses = self.rank[source] // group != self.rank // group
            within = torch.where(crosses, within.clamp(min=1 / rate), within)
        within *= max(1.0, members / 2) ** self.rates.crowding
        seconds = size * torch.where(inter, 1 / self.rates.link(inter=True), within)
        return torch.where(size > 0, seconds + self.rates.latency, -torch.inf)

    def _exchange(self, kind: Kind) -> float:
        """Return the seconds of an all-to-all in a head group; 0 if the pass has no message of this kind."""
        size, heads = self.size.get(kind, 0), self.route.heads
        if heads == 1 or not size:
            return 0.0
        node = self.placement.rank(self.here[:1], torch.arange(heads)) // self.intra
        peers = int((node == node[0]).sum()) - 1
        self.sent += torch.tensor([peers * size, (heads - 1 - peers) * size])
        within = (
            peers * max(1.0, min(self.intra, heads) / 2) ** self.rates.crowding / self.rates.link(inter=False)
        )
        between = (heads - 1 - peers) / self.rates.link(inter=True)
        copy_seconds = COPIES * heads / self.rates.memory
        return float(size * (max(within, between) + copy_seconds) + self.rates.latency)

    def _steps(self, source: Tensor) -> Tensor:
        """Return the seconds of steps, [steps, ring ranks]: of kernels, with the all-to-all of rows."""
        work, heads = self.work[self.here, source], self.route.heads
        if heads == 1:
            return work
        rows, result = self._exchange(Kind.STAYING_IN), self._exchange(Kind.STAYING_OUT)
        last = ((work > 0) * torch.arange(len(work))[:, None]).amax(0, keepdim=True)
        if self.route.overlap:  # rows come in the first step member by member, results leave in the last
            by_member = self.by_member[self.here, source]
            work = work.scatter(0, last, by_member.gather(0, last))
            work[0] = by_member[0] if rows else work[0]
        if not self.overlap:
            work[0] += rows
            return work.scatter_add(0, last, torch.full_like(work[:1], result))
        work[0] = torch.maximum(work[0], rows + work[0] / heads)
        leaving = work.gather(0, last)
        work = work.scatter(0, last, torch.maximum(leaving, result + leaving / heads))
        return work.clamp(min=rows + result) if len(work) == 1 else work

    def _direct(self) -> Tensor:
        """Return the seconds of a direct exchange: rows arrive while earlier rows are computed."""
        distance = self.here[:, None]
        source, target = (self.here - distance) % len(distance), (self.here + distance) % len(distance)
        crowd, work = min(self.intra, self.placement.size), self._steps(source)
        data = self._transfer(source, self.read[source, self.here] * self.size[Kind.DATA], crowd).clamp(min=0)
        computes = (work > 0) | (distance == 0)
        before = torch.where(computes, distance, 0).cummax(0).values
        message_seconds = torch.zeros(len(distance) + 1, len(distance), dtype=torch.float64)
        message_seconds.scatter_add_(0, before[:-1], torch.maximum(data, data.gather(1, target))[1:])
        if self.moves.gradients:  # sent back during the next step that computes
            gradient = self.read[self.here, target] * self.size[Kind.GRADIENT]
            back = self._transfer(target, gradient, crowd).clamp(min=0)
            after = torch.where(computes, distance, len(distance)).flip(0).cummin(0).values.flip(0)
            message_seconds.scatter_add_(0, after[1:], torch.maximum(back, back.gather(1, source))[:-1])
            message_seconds[-1] += torch.maximum(back, back.gather(1, source))[-1]
        steps = torch.maximum(work, message_seconds[:-1]) if self.overlap else work + message_seconds[:-1]
        return steps.sum(0) + message_seconds[-1]

    def _ring(self) -> Tensor:
        """Return the end times of ring ranks on a (double) ring."""
        nodes, intra, gradients = self.route.nodes, self.route.intra, self.moves.gradients
        i, j = torch.arange(nodes)[:, None, None], torch.arange(intra)[:, None]
        node, place, turn = self.here // intra, self.here % intra, self.route.turn
        owner = (node - turn * i) % nodes * intra + (place - turn * j) % intra
        reader = (node + turn * i) % nodes * intra + (place + turn * j) % intra
        previous, before = owner[0, 1 % intra], owner[1 % nodes, 0]
        rounds = visits(nodes, intra, gradients=gradients)
        steps = torch.tensor([each * intra + at for each, places in rounds for at in places])
        read = self.read[self.here, reader]  # of each owner's block, by round and place
        by_round = read.amax(1)
        ahead = read.flip(1).cummax(1).values.flip(1)[i, j, owner] * self.size[Kind.DATA]
        ahead_of_round = by_round.flip(0).cummax(0).values.flip(0)[i[:, 0], owner[:, 0]]
        within, across = torch.zeros_like(ahead), torch.zeros(nodes + 1, len(node), dtype=torch.float64)
        within[:, :-1] = ahead[:, 1:]
        across[: nodes - 1] = ahead_of_round[1:] * self.size[Kind.DATA]
        if gradients:
            so_far = read.cummax(1).values[:, :-1]
            within[:, 1:] += so_far[i, j[:-1], owner[:, 1:]] * self.size[Kind.GRADIENT]
            by_round[0] *= nodes == 1
            in_rounds = by_round.cummax(0).values[i[:, 0], owner[:, 0]] * self.size[Kind.GRADIENT]
            across[2:] = in_rounds[1:]
            if nodes > 1 and intra > 1:  # the blocks of the own node come last
                within[0, 0], within[-1, -1] = 0, ahead[0, 1]
        transfers = self._transfer(previous, within.flatten(0, 1)[steps])
        between = self._transfer(before, across[: len(rounds)])
        inner = zip(self._steps(owner.flatten(0, 1)[steps]), transfers, strict=True)
        clock = torch.zeros(len(node), dtype=torch.float64)
        for (_, places), seconds in zip(rounds, between, strict=True):
            round_start = clock
            for _, (kernel, transfer) in zip(places, inner, strict=False):
                end = clock + kernel
                clock = _met(end, clock if self.overlap else end, previous, transfer)
            clock = _met(clock, round_start if self.overlap else clock, before, seconds)
        home = previous if intra > 1 else before
        total = self._transfer(home, read.amax((0, 1)) * self.size[Kind.TOTAL] * gradients)
        carried = torch.maximum(*(each.clamp(min=0).sum(0) for each in (transfers, between)))
        return _met(clock, clock, home, total) + carried * (self.longer - 1)


def _met(clock: Tensor, begun: Tensor, source: Tensor, seconds: Tensor) -> Tensor:
    """Return the times after a wait at `clock` for messages, received and sent, that began at `begun`."""
    arrival = torch.maximum(begun, begun[source]) + seconds
    return torch.maximum(clock, torch.maximum(arrival, arrival[source.argsort()]))
