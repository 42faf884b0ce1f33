"""Lower bounds on the time of a pass, without simulation: a route that cannot win is not simulated."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.autotune.cost import Sizes
from burst_mcore.attention.autotune.lockstep import KernelWork
from burst_mcore.attention.geometry.reading import Reading
from burst_mcore.attention.schedule.actions import Kind, Pass
from burst_mcore.attention.schedule.route import PASSES, Route
from burst_mcore.rates import Rates

SAMPLED = 32
"""Positions whose messages are examined, or a few more: a bound for some ranks bounds the slowest."""


def at_least(
    pass_: Pass, route: Route, reading: Reading, work: KernelWork, sizes: Sizes, intra_size: int, rates: Rates
) -> float:
    """Return the seconds that the slowest rank needs at least: for its kernel, or for the rows that travel.

    Args:
        pass_: the pass that is bounded.
        reading: who reads which of the rows that travel.
        work: seconds of the kernel.
        sizes: bytes of the messages.
        intra_size: ranks of a node.
    """
    if route.positions == 1:
        return work.busiest
    if route.rings > 1:
        return work.busiest_of(route.of(pass_).rings)
    sampled = torch.arange(0, route.positions, route.positions // SAMPLED | 1)  # odd: at all places of a node
    node = route.placement.rank(torch.arange(route.positions), 0) // intra_size
    lent = _elsewhere(reading.counts, sampled) * (sizes.whole[Kind.DATA] / sizes.rows)
    if not route.direct:
        return max(work.busiest, _longest_way(lent, sampled, node, route, rates))
    if PASSES[pass_].gradients:
        lent += _elsewhere(reading.counts.T, sampled) * (sizes.whole[Kind.GRADIENT] / sizes.rows)
    return max(work.busiest, _longest_send(lent, sampled, node, rates))


def _elsewhere(counts: Tensor, sampled: Tensor) -> Tensor:
    """Return counts of sampled positions and all others, [sampled, positions], without their own."""
    rows = counts.index_select(0, sampled).double()
    rows[torch.arange(len(sampled)), sampled] = 0
    return rows


def _longest_send(sent: Tensor, sampled: Tensor, node: Tensor, rates: Rates) -> float:
    """Return the seconds until a rank has sent its bytes, [sampled, receivers], over its two links."""
    across = node[sampled][:, None] != node
    between = (sent * across).sum(1).max() / rates.link(inter=True)
    within = (sent * ~across).sum(1).max() / rates.link(inter=False)
    return float(torch.maximum(between, within))


def _longest_way(lent: Tensor, sampled: Tensor, node: Tensor, route: Route, rates: Rates) -> float:
    """Return the seconds until bytes, [sampled, readers], reach their farthest reader, hop by hop."""
    between, within = _hops(sampled, node, route)
    seconds = between * (rates.latency + lent / rates.link(inter=True))
    seconds += within * (rates.latency + lent / rates.link(inter=False))
    return float(seconds.masked_fill_(lent == 0, 0).max())


def _hops(sampled: Tensor, node: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    """Return the hops of a bundle to each reader, [sampled owners, readers]: between and within nodes."""
    position, turn = torch.arange(route.positions), route.turn
    m, l = position // route.intra, position % route.intra  # noqa: E741
    rounds = (m - m[sampled][:, None]) * turn % route.nodes
    steps = (l - l[sampled][:, None]) * turn % route.intra
    if route.nodes > 1:
        return rounds, steps
    crosses = (node != node.roll(-turn)).long()  # the hop that leaves each position
    ahead = (sampled[:, None] + turn * position) % route.positions
    crossed = crosses[ahead].cumsum(1) - crosses[ahead]
    between = crossed.gather(1, steps)
    return between, steps - between
