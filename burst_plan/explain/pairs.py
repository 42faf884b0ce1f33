"""The query-key pairs that each position of a route computes."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.layout.balance import work


def pairs_at(plan: Plan, pass_: Pass) -> Tensor:
    """Return the pairs that each position computes in a pass, float64 [positions]."""
    placement = plan.placement
    of_ranks = work(plan.layout, plan.mask, plan.n, placement.size)[pass_ == Pass.QUERY].double()
    position = placement.position(torch.arange(placement.size))
    return of_ranks.new_zeros(placement.positions).index_add_(0, position, of_ranks)


def unevenness(plan: Plan, pass_: Pass) -> float:
    """Return the pairs of the busiest position in a pass over the mean; 1.0 is even."""
    pairs = pairs_at(plan, pass_)
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0
