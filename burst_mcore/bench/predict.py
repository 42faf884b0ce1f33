"""What the cost model says of a call on a cluster that need not be here: for `explain` and `draw`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from burst_mcore.attention.actions import Compute
from burst_mcore.attention.choice import (
    RINGS,
    Candidate,
    Ranks,
    best,
    candidates,
    legal_degrees,
    reason,
    route_for,
    why_not_degree,
)
from burst_mcore.attention.cost import Shard, message_bytes, pass_flops
from burst_mcore.attention.plan import plan
from burst_mcore.attention.schedule import Schedule, schedule
from burst_mcore.attention.timeline import play
from burst_mcore.attention.trace import Event
from burst_mcore.bench.problem import DTYPES, Problem
from burst_mcore.layout import Layout
from burst_mcore.rates import Rates

GRAD_ITEMSIZE = 4
SUFFIXES = {"": 1, "K": 2**10, "M": 2**20}


def tokens(text: str) -> int:
    """A length such as 4096, 128K or 1M, in tokens. Raises ValueError for others."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"a number of tokens looks like 4096, 128K or 1M, got {text!r}")
    return int(found[1]) * SUFFIXES[found[2]]


def cluster(text: str) -> Ranks:
    """M x L, such as 4x8: 4 nodes of 8 ranks. Raises ValueError for others."""
    found = re.fullmatch(r"(\d+)x(\d+)", text.lower())
    if found is None or 0 in (int(found[1]), int(found[2])):
        raise ValueError(f"a cluster is nodes x ranks of a node, such as 4x8, got {text!r}")
    return Ranks(int(found[1]) * int(found[2]), int(found[2]))


def shard_of(problem: Problem, ranks: Ranks) -> Shard:
    """One rank's share. Raises ValueError if the sequence cannot be dealt zigzag."""
    Layout("zigzag").runs(problem.seq, 0, ranks.size)
    return Shard(
        problem.batch,
        problem.seq // ranks.size,
        problem.heads,
        problem.kv_heads,
        problem.head_dim,
        problem.head_dim,
        DTYPES[problem.dtype].itemsize,
        GRAD_ITEMSIZE,
    )


def explain(problem: Problem, ranks: Ranks, rates: Rates, *, ring: str, overlap: bool) -> str:
    """All ways to run a call, what each costs, which one is chosen and why; in words."""
    found = candidates(
        shard_of(problem, ranks),
        Layout("zigzag"),
        problem.mask,
        problem.seq,
        ranks,
        rates,
        overlap=overlap,
        rings=RINGS if ring == "auto" else (ring,),
        degrees=tuple(legal_degrees(ranks, problem.heads, problem.kv_heads)),
        directions=("query", "kv"),
    )
    chosen = best(found)
    ordered = sorted(found, key=lambda candidate: candidate.seconds)
    table: str = tabulate([_row(c, chosen) for c in ordered], headers="keys", floatfmt=".4g")
    return (
        f"{table}\n\nchosen: ring={chosen.ring!r}, head_parallel={chosen.route.heads}, "
        f"backward={chosen.direction!r} "
        f"({chosen.route}): {reason(chosen, found)}\n"
        f"(predicted, not measured: {rates.intra / 1e9:g} GB/s within a node, {rates.inter / 1e9:g} GB/s a "
        f"rank between nodes, {rates.compute / 1e12:g} TFLOP/s, {rates.latency * 1e6:g} us a message)"
    )


def _row(candidate: Candidate, chosen: Candidate) -> dict[str, Any]:
    return {
        "": "*" if candidate is chosen else "",
        "head_parallel": candidate.route.heads,
        "backward": candidate.direction,
        "ring": candidate.ring,
        "positions": f"{candidate.route.nodes} x {candidate.route.intra}",
        "forward ms": candidate.forward_seconds * 1e3,
        "backward ms": candidate.backward_seconds * 1e3,
        "total ms": candidate.seconds * 1e3,
        "kernel ms": candidate.compute_seconds * 1e3,
        "intra MB": candidate.intra_bytes / 1e6,
        "inter MB": candidate.inter_bytes / 1e6,
    }


@dataclass(frozen=True)
class Drawing:
    """A schedule and its predicted timeline."""

    schedule: Schedule
    events: Sequence[Event]


def draw(
    problem: Problem, ranks: Ranks, rates: Rates, *, name: str, degree: int, ring: str, overlap: bool
) -> Drawing:
    """The schedule of the pass `name` ("forward", "query", "kv"), and when every rank does what.

    Raises:
        ValueError: `degree` ranks cannot share the heads, or the sequence cannot be dealt.
    """
    why_not = why_not_degree(degree, ranks, problem.heads, problem.kv_heads)
    if why_not is not None:
        legal = legal_degrees(ranks, problem.heads, problem.kv_heads)
        raise ValueError(f"head_parallel={degree} is not legal here: {why_not}; legal: {legal}")
    shard, route = shard_of(problem, ranks), route_for(degree, ranks, ring=ring, overlap=overlap)

    what = plan(Layout("zigzag"), problem.mask, problem.seq, route.positions, route.heads)

    def seconds(rank: int, action: Compute) -> float:
        here, part = rank // route.heads, action.part
        if name == "query":
            met = what.pieces(action.source, here, k_part=part)
        else:
            met = what.pieces(here, action.source, q_part=part)
        pairs = sum(piece.pairs for piece in met)
        return pass_flops(shard.pooled(route.heads), pairs, name) / rates.compute

    drawn = schedule(route, name, what)
    return Drawing(drawn, play(drawn, message_bytes(shard, route, name), seconds, ranks.intra, rates))
