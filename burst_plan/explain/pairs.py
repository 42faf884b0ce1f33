"""The query-key pairs of a route's positions: of which rows each computes, and how many pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.autotune.costing import pairs_of
from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.layout.balance import work


def met_at(route: Route, pass_: Pass, position: int) -> tuple[range, range]:
    """Return the positions whose rows stay at `position` in a pass, and those whose bundles come there.

    On a mesh these are a column and a ring; else the position itself, and all positions.
    """
    places = route.of(pass_).places
    first = position - position % places
    return range(position % places, route.positions, places), range(first, first + places)


def pairs_at(plan: Plan, route: Route, pass_: Pass) -> Tensor:
    """Return the pairs that each position computes in a pass, float64 [positions]; on rings exactly."""
    size, rings = plan.placement.size, route.of(pass_).rings
    if rings == 1:
        of_rank = work(plan.layout, plan.mask, plan.n, size)[pass_ == Pass.QUERY].double()
        return _pooled(of_rank, plan.placement)
    pairs = _pooled(pairs_of(plan.layout, plan.mask, plan.n, size), plan.placement)
    pairs = _pooled(pairs.T, plan.placement)  # [keys, queries]
    places = plan.size // rings
    stay_and_come = pairs if pass_ == Pass.QUERY else pairs.T
    return stay_and_come.reshape(rings, places, rings, places).sum((0, 3)).T.flatten()


def _pooled(of_ranks: Tensor, placement: Placement) -> Tensor:
    """Return the sums over the members of each position; the first dimension is that of ranks."""
    position = placement.position(torch.arange(placement.size))
    sums = of_ranks.new_zeros(placement.positions, *of_ranks.shape[1:])
    return sums.index_add_(0, position, of_ranks)


def unevenness(plan: Plan, route: Route, pass_: Pass) -> float:
    """Return the pairs of the busiest position in a pass over the mean; 1.0 is even."""
    pairs = pairs_at(plan, route, pass_)
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0
