"""The rule by which a call runs: the plainest of the candidates with the best lower bound of time.

Candidates are the routes that settings allow. The bound of a pass is the sum over its steps of max(kernel
seconds, message seconds). A message starts when both of its ends have reached its step. Pairs and bytes are
counted, not simulated. `burst_plan` simulates the same candidates, and prints the loss of the rule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import Plan, plan_of
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.schedule.actions import Kind, Pass
from burst_mcore.attention.schedule.heads import degrees_of
from burst_mcore.attention.schedule.ring import visits
from burst_mcore.attention.schedule.route import PASSES, Route, message_bytes, placements, rings_of, route_for
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.mask.terms import Documents, Window
from burst_mcore.rates import Rates

logger = logging.getLogger("burst_mcore")

AS_FAST = 1.05
"""Candidates within this factor of the fastest count as equally fast: the model's median error is 6.6 %."""
COPIES = 4
"""Memory accesses for a byte of an all-to-all: packed and unpacked, each read and written."""


class Family(IntEnum):
    """The kinds of candidates of "auto", the plainest first: at a tie the first wins."""

    RING = 0
    HEADS_WITHIN = 1
    DIRECT = 2
    HEADS_ACROSS = 3

    @classmethod
    def of(cls, route: Route, intra: int) -> Family:
        """Return the most complex feature that a route uses; intra: ranks of a node."""
        if route.heads > 1 and route.size > intra and (route.outer or intra % route.heads):
            return cls.HEADS_ACROSS
        if route.direct:
            return cls.DIRECT
        return cls.HEADS_WITHIN if route.heads > 1 else cls.RING


@dataclass(frozen=True)
class Question:
    """The facts about a call that decide its time, without settings; the cache key of decisions."""

    shard: Shard
    layout: Layout
    mask: Mask
    n: int
    """Tokens of the whole sequence."""
    ranks: Ranks
    rates: Rates

    @cached_property
    def typical(self) -> Question:
        """The representative of all questions with documents of a kind.

        Its documents are about as long as a typical token's document, rounded to a power of two. Their
        lengths differ, so that they end anywhere in a rank's shard, like real documents.
        """
        ends, layout, size = self.mask.document_ends, self.layout, self.ranks.size
        if ends is None:
            return self
        lengths = ends.diff().double()
        length = min(self.n, 2 ** round(float(((lengths**2).sum() / lengths.sum()).log2())))
        unit = 2 * size if layout.kind == "zigzag-documents" else 1
        cycle = (torch.tensor([45, 17, 31, 22, 40]) * length // (31 * unit)).clamp(min=1) * unit
        ends = cycle.repeat(self.n // int(cycle.sum()) + 1).cumsum(0)
        cuts = (0, *ends[ends < self.n].tolist(), self.n)
        if layout.kind == "zigzag-documents":
            layout = Layout("zigzag-documents", ends=cuts)
        if layout.kind == "chunks":  # sharded in turn
            chunks = range(size * len(layout.chunks[0]))
            layout = Layout("chunks", chunks=tuple(tuple(chunks[rank::size]) for rank in range(size)))
        return replace(self, layout=layout, mask=self.mask.of_layer & Mask.documents(cuts))

    @property
    def reach(self) -> int | None:
        """Tokens between a query and its farthest key, if windows or documents bound them."""
        ends, windows = self.mask.document_ends, (t for t in self.mask.terms if isinstance(t, Window))
        bounds = [window.left for window in windows if window.left is not None]
        return min(bounds + ([] if ends is None else [int(ends.diff().max())]), default=None)

    def shortened(self, degrees: Sequence[int]) -> Question:
        """Return the question on fewer nodes (64 ranks or more), if a ring's steps are alike."""
        intra, tokens = self.ranks.intra, self.shard.tokens
        least = max(64, 4 * max(degrees), 2 * (self.reach or 0) / tokens)
        fits = (x for x in range(intra, self.ranks.size, intra) if self.ranks.size % x == 0 and x >= least)
        size = next((x for x in fits if not any(x % each for each in degrees)), None)
        alike = all(isinstance(term, (Window, Documents)) for term in self.mask.terms)
        if not alike or size is None or self.layout.kind in ("chunks", "zigzag-documents"):
            return self
        n = tokens * size
        return replace(self, mask=self.mask.clipped(n), n=n, ranks=Ranks(size, intra)).typical


class Settings(NamedTuple):
    """The values to try of each setting of `BurstConfig`."""

    overlap: bool
    rings: tuple[str, ...]
    degrees: tuple[int, ...]
    directions: tuple[Pass, ...]
    placement: str = "auto"


def settings_of(config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None) -> Settings:
    """Return the values of settings that a configuration allows; degrees: of head parallelism, if known."""
    degrees = degrees or degrees_of(config, question.ranks, question.shard)
    sides = (Pass.QUERY, Pass.KV) if config.backward == "auto" else (Pass(config.backward),)
    rings = rings_of(config.ring, question.ranks)
    return Settings(config.overlap, rings, degrees, sides, config.head_placement)


def routes(question: Question, settings: Settings) -> dict[Route, str]:
    """Return the routes that settings allow, each with its option of `BurstConfig.ring`."""
    ranks, words = question.ranks, dict[Route, str]()
    for degree in settings.degrees:
        # Compute member by member only where it hides a message.
        hides = settings.overlap and (question.rates.hidden or degree < ranks.size or degree == 1)
        for outer, ring in product(placements(settings.placement, degree, ranks), settings.rings):
            if ring == "flat" and "double" in settings.rings and degree >= ranks.intra and not outer:
                continue  # the same route: each node shares all heads
            words.setdefault(route_for(degree, ranks, ring=ring, overlap=hides, outer=outer), ring)
    return words


def kernel_seconds(shard: Shard, pass_: Pass, rates: Rates, pairs: Tensor) -> Tensor:
    """Return the seconds of kernel calls and of their passes over memory, by their query-key pairs.

    The rows of a call are estimated as sqrt(2 pairs), the side of a triangle with as many pairs. A rotating
    latent is expanded for each block.
    """
    forward, heads = pass_ == Pass.FORWARD, shard.batch * shard.heads
    rate = rates.compute if forward else rates.backward or rates.compute
    d, dv = rates.computed(shard.head_dim), rates.computed(shard.value_dim)
    width = d + dv if forward else 3 * d + 2 * dv  # of 2 products, or of 5
    per_pair = 2 * heads * width / rate + heads / rates.exponentials
    wave = rates.wave if forward or rates.wave_backward is None else rates.wave_backward
    q, out, kv = heads * shard.head_dim, heads * shard.value_dim, shard.batch * math.prod(shard.carried)
    # Bytes for each number of a row, as tests/kernels/test_passes.py counts them on a ring of 8.
    moves = {Pass.FORWARD: 2.5 * out, Pass.KV: 2.5 * q + 10 * kv, Pass.QUERY: 10 * q + 2.5 * kv + 3.3 * out}
    per_row = (rates.fill + wave / 2 / heads) * per_pair + moves[pass_] / rates.memory
    if shard.latent_rotates and pass_ != Pass.QUERY:
        per_row += expansion_seconds(shard, pass_, rates)
    return pairs * per_pair + (2 * pairs).sqrt().clamp(max=shard.tokens) * per_row


def expansion_seconds(shard: Shard, pass_: Pass, rates: Rates) -> float:
    """Return the seconds to expand the latent of one token of each sequence, in backward with gradients."""
    if shard.latent is None:
        return 0.0
    products = 1 if pass_ == Pass.FORWARD else 3  # of K and V; of the latent's and of the weights'
    width, rope = shard.latent
    outputs = shard.batch * shard.kv_heads * (shard.head_dim - rope + shard.value_dim)
    traffic = 2 * outputs * shard.itemsize * (1 if products == 1 else 2)
    return 2 * products * outputs * width / rates.compute + traffic / rates.memory


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


def best(costed: Sequence[Candidate]) -> Candidate:
    """Return the plainest of the candidates that are as fast as the fastest (`AS_FAST`).

    A ring is plainer than head parallelism within a node; then come a direct exchange and head parallelism
    across nodes (`Family`). A double ring is plainer than a flat ring. A tie goes to the fewest bytes between
    nodes, then within nodes. So backward sends the side with fewer bytes; at a tie queries, the paper's
    choice. On a ring of one rank both send as many: the faster, or "kv", which can start before all of dO
    has arrived. A causal ring is mirrored: more rows stay at home, and peak memory is lower.
    """
    fastest = min(candidate.seconds for candidate in costed)
    return min((c for c in costed if c.seconds <= AS_FAST * fastest), key=_order)


def _order(c: Candidate) -> tuple[float, ...]:
    route, sizes, of_kv = c.route, (c.inter_bytes, c.intra_bytes), c.direction != Pass.QUERY
    side = (float(f"{c.seconds:.2e}"), not of_kv) if route.ring_size == 1 else (of_kv,)
    return (c.family, c.ring == "flat", *sizes, route.heads, route.outer, *side, route.mirrored)


class Decision(NamedTuple):
    """The chosen route and options of a call."""

    route: Route
    direction: Pass
    latent_rotates: bool


def decide(config: BurstConfig, question: Question, rotates: str = "off") -> Decision:
    """Return the decision for a call, made and logged once for each kind of question.

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
    forms = {"off": (False,), "on": (True,), "auto": (False, True)}[rotates]
    shards = [replace(question.shard, latent_rotates=each) for each in forms]
    bests = [best(candidates(replace(question, shard=each), settings)) for each in shards]
    # The latent rotates if that is not slower than K and V, and `best` prefers it.
    plan = bests[-1] if bests[-1].seconds <= bests[0].seconds and best(bests) is bests[-1] else bests[0]
    times = 1e3 * plan.seconds, 1e3 * plan.compute_seconds
    logger.info(
        "%s, backward %s: predicted %.1f ms, kernel alone %.1f ms", plan.route, plan.direction, *times
    )
    return Decision(plan.route, plan.direction, forms[bests.index(plan)])


def candidates(question: Question, settings: Settings) -> list[Candidate]:
    """Return all candidates of the settings, rings in both directions, with counted seconds and bytes."""
    short, results = question.shortened(settings.degrees), list[Candidate]()
    pairs = pairs_between(short.layout, short.mask, short.n, short.ranks.size)
    # With windows the additional steps of a longer ring only carry messages.
    longer = 1.0 if question.reach is None else question.ranks.size / short.ranks.size
    route_pairs = zip(routes(short, settings).items(), routes(question, settings), strict=True)
    for (route, ring), long_route in route_pairs:
        plan = plan_of(short.layout, short.mask, short.n, route.placement)
        for turn in (False, True) if route.has_mirror and not plan.everything else (False,):
            passes = Pass.FORWARD, *settings.directions
            variant, long_variant = (replace(each, mirrored=turn) for each in (route, long_route))
            first, *others = (_Counted(short, plan, pairs, variant, each, longer) for each in passes)
            for side, second in zip(settings.directions, others, strict=True):
                seconds = first.seconds, second.seconds, first.busiest + second.busiest
                within, between = map(round, (first.sent + second.sent).tolist())
                family = Family.of(long_route, question.ranks.intra)
                results.append(Candidate(ring, long_variant, side, *seconds, within, between, family))
    return results


class _Counted:
    """The seconds of a pass over a route, and the bytes that a rank sends."""

    def __init__(
        self, question: Question, plan: Plan, pairs: Tensor, route: Route, pass_: Pass, longer: float
    ) -> None:
        shard, rates, of_queries = question.shard, question.rates, pass_ == Pass.QUERY
        self.route, self.rates, self.intra = route, rates, question.ranks.intra
        self.size, self.gradients = message_bytes(shard, route, pass_), PASSES[pass_].gradients
        self.overlap = route.overlap and rates.hidden  # else messages take the cores that compute
        self.sent = torch.zeros(2, dtype=torch.float64)
        """Bytes within nodes, and between nodes."""
        self.here = torch.arange(route.ring_size)
        ranks = route.placement.rank(self.here[:, None], torch.arange(route.heads))
        self.rank, self.members = ranks[:, 0], ranks[0]
        self.read = plan.reading(of_queries=of_queries).shared.double().fill_diagonal_(0) / plan.rows
        """The remote shares of rotating blocks, [owners, readers]."""
        pairs = pairs[ranks[:, :, None, None], ranks]  # [ring ranks, members] of queries, then of keys
        pairs = (pairs.permute(2, 3, 0, 1) if of_queries else pairs).sum(3)
        seconds = partial(kernel_seconds, shard.pooled(route.heads), pass_, rates)
        self.work, self.parts = seconds(pairs.sum(1)), seconds(pairs).sum(1)
        """Seconds of the kernel, [ring ranks, sources]; `parts`: with staying rows member by member."""
        self.busiest = float(self.work.sum(1).max())
        end = self._direct() if route.direct else self._ring(longer)
        device = float(end.max()) + self._exchange(Kind.ROTATING_IN) + self._exchange(Kind.ROTATING_OUT)
        if not shard.latent_rotates or of_queries:
            device += shard.tokens * expansion_seconds(shard, pass_, rates)
        calls = int((self.work > 0).sum(1).max()) + 2 * (route.heads > 1)
        self.seconds = max(device, calls * rates.call)  # the host runs ahead

    def _exchange(self, kind: Kind) -> float:
        """Return the seconds of an all-to-all in a head group; 0 if the pass has no message of this kind."""
        size, heads, intra = self.size.get(kind, 0), self.route.heads, self.intra
        if heads == 1 or not size:
            return 0.0
        within = int((self.members // intra == self.members[0] // intra).sum()) - 1
        between = heads - 1 - within
        self.sent += torch.tensor([within * size, between * size])
        slowdown = max(1.0, min(intra, heads) / 2) ** self.rates.crowding
        wire = max(within * slowdown / self.rates.link(inter=False), between / self.rates.link(inter=True))
        return float(size * (wire + COPIES * heads / self.rates.memory) + self.rates.latency)

    def _transfer(self, source: Tensor, size: Tensor) -> Tensor:
        """Return the seconds of messages from these ring ranks, by their bytes; -inf without a message."""
        inter = self.rank[source] // self.intra != self.rank // self.intra
        self.sent += torch.stack([size * ~inter, size * inter]).mean(-1).view(2, -1).sum(1)
        members = min(self.intra, self.route.size) if self.route.direct else 1
        slowdown = max(1.0, members / 2) ** self.rates.crowding
        within, between = slowdown / self.rates.link(inter=False), 1 / self.rates.link(inter=True)
        seconds = size * torch.where(inter, between, within)
        return torch.where(size > 0, seconds + self.rates.latency, -torch.inf)

    def _kernels(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the seconds of steps, [steps, ring ranks], and of results sent after the last, [ring ranks].

        Rows arrive beside the own part, in the first step. Results leave in the last, by pairs of members.
        """
        work, heads = self.work[self.here, source], self.route.heads
        rows, result = (self._exchange(kind) for kind in (Kind.STAYING_IN, Kind.STAYING_OUT))
        last = ((work > 0) * torch.arange(len(work))[:, None]).amax(0)
        if not self.overlap:
            work[0] += rows
            return work, torch.full_like(work[0], result)
        parts, own_first = self.parts[self.here, source], (last == 0) * (rows > 0)
        of_last = work[last, self.here] = parts[last, self.here]
        if rows:
            work[0] = parts[0] + (rows - parts[0] / heads).clamp(min=0)
        hidden = of_last * (heads - min(2, heads - 1) - own_first.double()) / heads
        return work, (result - hidden).clamp(min=0).maximum(own_first * result / max(1, heads - 1))

    def _direct(self) -> Tensor:
        """Return the end times of a direct exchange: rows arrive while earlier rows are computed."""
        source = (self.here - self.here[:, None]) % len(self.here)
        size = self.size[Kind.DATA] + self.size[Kind.GRADIENT] * self.gradients
        transfers = self._transfer(source, self.read[source, self.here] * size)
        work, results = self._kernels(source)
        clock = starts = torch.zeros_like(results)
        for owner, kernel, transfer in zip(source, work, transfers, strict=True):
            clock = _met(clock, starts if self.overlap else clock, owner, transfer)
            starts = torch.where(kernel > 0, clock, starts)  # of the step that computes meanwhile
            clock = clock + kernel
        return clock + results

    def _ring(self, longer: float) -> Tensor:
        """Return the end times of ring ranks on a (double) ring, with `longer` times the messages."""
        nodes, intra, turn = self.route.nodes, self.route.intra, self.route.turn
        i, j = torch.arange(nodes)[:, None, None], torch.arange(intra)[:, None]
        node, place = self.here // intra, self.here % intra
        owner = (node - turn * i) % nodes * intra + (place - turn * j) % intra
        reader = (node + turn * i) % nodes * intra + (place + turn * j) % intra
        previous, before = owner[0, 1 % intra], owner[1 % nodes, 0]
        rounds = visits(nodes, intra, gradients=self.gradients)
        steps = torch.tensor([each * intra + at for each, places in rounds for at in places])
        data, gradient = self.size[Kind.DATA], self.size[Kind.GRADIENT]
        read = self.read[self.here, reader]  # of each owner's block, by round and place
        by_round, at = read.amax(1), (i[:, 0], owner[:, 0])
        onward = read.flip(1).cummax(1).values.flip(1)[i, j, owner] * data
        within, across = torch.zeros_like(read), torch.zeros(nodes + 1, len(node), dtype=torch.float64)
        within[:, :-1] = onward[:, 1:]
        across[: nodes - 1] = by_round.flip(0).cummax(0).values.flip(0)[at][1:] * data
        if self.gradients:
            within[:, 1:] += read.cummax(1).values[:, :-1][i, j[:-1], owner[:, 1:]] * gradient
            by_round[0] *= nodes == 1
            across[2:] += by_round.cummax(0).values[at][1:] * gradient
            if nodes > 1 and intra > 1:  # the blocks of the own node come last
                within[0, 0], within[-1, -1] = 0, onward[0, 1]
        transfers = self._transfer(previous, within.flatten(0, 1)[steps])
        between = self._transfer(before, across[: len(rounds)])
        kernels, results = self._kernels(owner.flatten(0, 1)[steps])
        inner = zip(kernels, transfers, strict=True)
        clock = torch.zeros_like(results)
        for (_, places), seconds in zip(rounds, between, strict=True):
            starts = clock
            for _, (kernel, transfer) in zip(places, inner, strict=False):
                end = clock + kernel
                clock = _met(end, clock if self.overlap else end, previous, transfer)
            clock = _met(clock, starts if self.overlap else clock, before, seconds)
        home, total = previous if intra > 1 else before, self.size[Kind.TOTAL] * self.gradients
        arrival = _met(clock, clock, home, self._transfer(home, read.amax((0, 1)) * total))
        busy = torch.maximum(*(each.clamp(min=0).sum(0) for each in (transfers, between)))
        return torch.maximum(arrival, clock + results) + busy * (longer - 1)


def _met(clock: Tensor, starts: Tensor, source: Tensor, seconds: Tensor) -> Tensor:
    """Return the times after a wait at `clock` for messages, received and sent, that begin at `starts`."""
    arrival = torch.maximum(starts, starts[source]) + seconds
    return torch.maximum(clock, torch.maximum(arrival, arrival[source.argsort()]))
