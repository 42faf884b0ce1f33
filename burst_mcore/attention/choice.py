"""The choices called "auto": ring, degree of head parallelism, what travels in backward. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_mcore.attention.actions import DATA, GRADIENT, Compute, Program, Send
from burst_mcore.attention.cost import (
    Shard,
    Sizes,
    allowed_pairs,
    link_bytes,
    message_bytes,
    pass_flops,
)
from burst_mcore.attention.heads import why_not_heads
from burst_mcore.attention.plan import Plan, plan
from burst_mcore.attention.schedule import Route, program
from burst_mcore.attention.timeline import play_one
from burst_mcore.attention.volume import Volume, read_elsewhere, volume
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

AS_FAST = 1.01
"""Candidates within this factor of the fastest are as fast; among them the one that moves fewest bytes wins,
since the rest of the training uses the links as well."""
WORTH_IT = 0.8
"""What a direct exchange must move at most of what a ring moves, to be taken instead of one as fast: a ring
needs neighbours only."""
RINGS = ("double", "flat", "direct")
SPARSE = 0.15
"""Where positions read less than this share of each other, only the direct exchange is costed."""


@dataclass(frozen=True)
class Ranks:
    """Where the ranks are, `size` in all and `intra` on each node: a Topology without its process groups."""

    size: int
    intra: int


@dataclass(frozen=True)
class Candidate:
    """A way to run a call, and its predicted cost on one rank."""

    ring: str
    route: Route
    direction: str
    forward_seconds: float
    backward_seconds: float
    intra_bytes: int
    inter_bytes: int
    """Sent in forward and backward."""
    compute_seconds: float
    """Of the kernel alone."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def why_not_placed(degree: int, ranks: Ranks) -> str | None:
    """Why the ranks cannot be cut into groups of `degree` neighbours; None if they can."""
    if ranks.size % degree:
        return f"it does not divide the {ranks.size} ranks"
    if ranks.intra % degree and degree % ranks.intra:
        return f"its groups would straddle nodes of {ranks.intra}"
    return None


def why_not_degree(degree: int, ranks: Ranks, heads: int, kv_heads: int) -> str | None:
    """Why `degree` neighbours cannot share these heads; None if they can."""
    return why_not_placed(degree, ranks) or why_not_heads(heads, kv_heads, degree)


def legal_degrees(ranks: Ranks, heads: int, kv_heads: int) -> list[int]:
    """The degrees of head parallelism that ranks and heads allow."""
    return [d for d in range(1, ranks.size + 1) if why_not_degree(d, ranks, heads, kv_heads) is None]


def route_for(degree: int, ranks: Ranks, *, ring: str, overlap: bool) -> Route:
    """The way over these ranks with `degree` neighbours sharing heads; ring: "double", "flat" or "direct"."""
    if ring == "direct":
        return Route(1, ranks.size // degree, degree, overlap, direct=ranks.size > degree)
    if ring == "flat" or ranks.size == ranks.intra:
        return Route(1, ranks.size // degree, degree, overlap)
    nodes = ranks.size // max(degree, ranks.intra)
    return Route(nodes, ranks.size // degree // nodes, degree, overlap)


def overlaps(overlap: bool, degree: int, ranks: Ranks, rates: Rates) -> bool:
    """Whether to communicate while computing, if `overlap` allows it.

    Not where all ranks share heads and messages take the cores that compute: nothing would be hidden, and
    computing member by member cuts tiles.
    """
    return overlap and (rates.hidden or degree < ranks.size or degree == 1)


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
    directions: tuple[str, ...],
) -> tuple[Candidate, ...]:
    """Every combination of ring, degree and direction, costed; rings the better way round.

    n: tokens in the global sequence.
    """
    found: list[Candidate] = []
    for ring, degree, direction in itertools.product(rings, degrees, directions):
        forwards = route_for(degree, ranks, ring=ring, overlap=overlaps(overlap, degree, ranks, rates))
        what = plan(layout, mask, n, forwards.positions, degree)
        if "direct" in rings and ring != "direct" and _sparse(what):
            continue
        both = forwards.positions > 1 and not forwards.direct and not what.everything
        ways = (forwards, replace(forwards, mirrored=True)) if both else (forwards,)
        if all((other.route, other.direction) != (route, direction) for other in found for route in ways):
            found.append(best([_candidate(shard, what, ranks, rates, ring, r, direction) for r in ways]))
    return tuple(found)


def _sparse(what: Plan) -> bool:
    return read_elsewhere(what, of_queries=False) < SPARSE


def best(found: Sequence[Candidate]) -> Candidate:
    """The fastest; among those as fast, the one whose bytes need the links for the shortest time."""
    fastest = min(candidate.seconds for candidate in found)
    as_fast = [candidate for candidate in found if candidate.seconds <= AS_FAST * fastest]
    chosen = min(as_fast, key=_order)
    rings = [c for c in as_fast if not c.route.direct and WORTH_IT * _bytes(c) < _bytes(chosen)]
    return min(rings, key=_order) if chosen.route.direct and rings else chosen


def _order(c: Candidate) -> tuple[float, ...]:
    return c.inter_bytes, c.intra_bytes, c.route.heads, _second(c), c.route.mirrored


def _bytes(candidate: Candidate) -> int:
    return candidate.inter_bytes + candidate.intra_bytes


def _second(candidate: Candidate) -> bool:
    """Whether the other direction is better where all else is equal.

    That is the paper's, but for a ring of one: there "kv" takes in dO rank by rank, "query" at once.
    """
    return (candidate.direction == "query") == (candidate.route.positions == 1)


def reason(chosen: Candidate, found: Sequence[Candidate]) -> str:
    """Why it was chosen, in words."""
    bound = chosen.compute_seconds / chosen.seconds
    what = f"{bound:.0%} of its {chosen.seconds:.3g} s is kernel time"
    others = [c for c in found if c is not chosen]
    if not others:
        return f"the only one; {what}"
    rival = min(others, key=lambda c: c.seconds)
    ring = f"{rival.ring}{', mirrored' * rival.route.mirrored}"
    name = f"{ring}, head_parallel={rival.route.heads}, {rival.direction}"
    slower = rival.seconds / chosen.seconds
    if slower > AS_FAST:
        return f"fastest: the next, {name}, takes {slower - 1:.0%} longer; {what}"
    return f"as fast as any (within {AS_FAST - 1:.0%}), and of these it moves the fewest bytes; {what}"


def _candidate(
    shard: Shard, what: Plan, ranks: Ranks, rates: Rates, ring: str, route: Route, direction: str
) -> Candidate:
    """Cost a call as the rank at the end of its node sees it: in a flat ring the one with the slow hop.

    Where the mask takes rows out of messages, every message counts as smaller by what all lose together.
    """
    rank = ranks.intra - 1
    pairs = allowed_pairs(what.mask, what.n) // (ranks.size * route.positions)
    seconds, sent, compute = [], {"intra": 0.0, "inter": 0.0}, 0.0
    played = route if rates.hidden else replace(route, overlap=False)
    for name in ("forward", direction):
        steps = program(rank, played, name)
        sizes = message_bytes(shard, route, name)
        # A position has the tokens of `heads` ranks, and each of them that share of the heads.
        step = pass_flops(shard, pairs, name) / rates.compute

        def compute_seconds(_: int, action: Compute, step: float = step) -> float:
            return step if action.part is None else step / route.heads

        moved = volume(what, route, name == "query", max(1, ranks.intra // route.heads))
        left = _left(moved, sizes, steps, route.positions)
        seconds.append(play_one(steps, rank, left, compute_seconds, ranks.intra, rates))
        for link, size in _sent(moved, sizes, steps, rank, ranks.intra, route.positions).items():
            sent[link] += size
        compute += step * route.positions
    intra, inter = round(sent["intra"]), round(sent["inter"])
    return Candidate(ring, route, direction, seconds[0], seconds[1], intra, inter, compute)


def _left(moved: Volume, sizes: Sizes, steps: Program, positions: int) -> Sizes:
    """The sizes of messages between positions, less what the mask takes out, as if from all alike."""
    whole = dict(sizes.whole)
    for kind, rows in ((DATA, moved.data), (GRADIENT, moved.gradient)):
        dense = sum(isinstance(action, Send) and action.channel.what == kind for action in steps)
        whole[kind] = whole[kind] * sum(rows.values()) // (dense * positions * sizes.rows) if dense else 0
    return Sizes(whole, sizes.rows)


def _sent(
    moved: Volume, sizes: Sizes, steps: Program, rank: int, intra_size: int, positions: int
) -> dict[str, float]:
    """Bytes that a rank sends on each link, on average."""
    heads = tuple(a for a in steps if isinstance(a, Send) and a.channel.link == "heads")
    sent = {link: float(size) for link, size in link_bytes(heads, rank, sizes, intra_size).items()}
    for kind, rows in ((DATA, moved.data), (GRADIENT, moved.gradient)):
        for link, total in rows.items():
            sent[link] += total * sizes.whole[kind] / (sizes.rows * positions)
    return sent
