"""Resolves requests to calls, each once, and makes their communicators."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from burst_mcore.attention.call import Call
from burst_mcore.attention.checks import check_lengths
from burst_mcore.attention.choose import Question, decide
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.geometry.tiles import launches_of
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.request import Request
from burst_mcore.attention.runtime.executor import GroupTransport
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import placements, rings_of, route_for
from burst_mcore.config import BurstConfig

CALLS = 64
"""The number of cached calls, equal to that of plans: the most recently used."""


@lru_cache(maxsize=CALLS)
def call_of(request: Request, lengths: tuple[int, ...]) -> Call:
    """Return the call with lengths[r] tokens on rank r; ValueError, on all ranks, if it is not legal."""
    n, size = sum(lengths), request.ranks.size
    check_lengths(request.layout, lengths)
    request.mask.check(n)
    mask = request.mask.clipped(n)
    shard = replace(request.shard, tokens=request.layout.padded(n, size) // size)
    question = Question(shard, request.layout, mask, n, request.ranks, request.rates)
    route, direction, latent_rotates = decide(request.config, question, request.rotates)
    shard = replace(shard, latent_rotates=latent_rotates)
    problem = problem_of(
        shard.pooled(route.heads),
        device=request.device,
        launches=launches_of(mask, n),
        documents=mask.document_ends is not None,
        softcap=request.scores.softcap is not None,
        deterministic=request.scores.deterministic,
    )
    return Call(
        rank=request.rank,
        route=route,
        plan=plan_of(request.layout, mask, n, route.placement),
        scores=request.scores,
        problem=problem,
        kernel=choose(request.config.kernel, problem),
        direction=direction,
        grad_dtype=shard.grad_dtype,
        kv_heads=shard.carried[0],
        latent_rotates=shard.latent_rotates,
        lse_at_home=request.return_lse or request.sinks,
    )


def problem_of(shard: Shard, **others: Any) -> Problem:
    """Return the kernel problem of a shard on the ring, with the given other fields."""
    names = "dtype", "heads", "kv_heads", "head_dim", "value_dim"
    return Problem(**{name: getattr(shard, name) for name in names}, **others)


def connect(topology: Topology, config: BurstConfig) -> None:
    """Make the communicators of calls with `config` now, instead of in the first call.

    Collective over the ring; a no-op on gloo. Options "auto" are decided only in a call.

    Raises:
        ValueError: head_parallel does not divide the ranks.
    """
    if topology.size == 1:
        return
    degree = config.head_parallel if isinstance(config.head_parallel, int) else 1
    ranks = Ranks(topology.size, topology.intra_size)
    if ranks.size % degree:
        raise ValueError(
            f"head_parallel={degree} is not legal with {ranks.size} ranks: it does not divide them"
        )
    variants = product(rings_of(config.ring, ranks), placements(config.head_placement, degree, ranks))
    for ring, outer in variants:
        route = route_for(degree, ranks, ring=ring, overlap=config.overlap, outer=outer)
        transport = GroupTransport(topology, route, config.max_ctas)
        for pass_ in Pass:
            transport.connect(pass_)
