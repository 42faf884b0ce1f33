"""The gate of attention: a method's error against float64, as a multiple of the local kernel's error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from burst_bench.core import World
from burst_bench.methods.attention import ShardedAttention
from burst_bench.methods.kernels import both_ways
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.mask import Mask
from burst_plan.explain.problem import LayerProblem

TOKENS = 512
"""Most tokens of the sequence on which a method must be right before it is timed."""
BOUND = 2.0
"""The largest legal error of a method, as a multiple of the kernel's."""
TABLE_TOKENS = 8192
"""The longest sequence over which the bare kernel gets a mask as a table of queries x keys."""


def error(problem: LayerProblem, attention: ShardedAttention, world: World) -> float:
    """Return the worst error of out, dq, dk, dv as a multiple of the bare kernel's. Collective."""
    tensors = problem.tensors()
    q, k, v, dout = (attention.shard(x).to(world.device) for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention.attend(*inputs)
    out.backward(dout)
    baselines = bare_kernel(problem, world.device)(*(x.to(world.device) for x in tensors))
    exact = both_ways(KERNELS["reference"], _table(problem), *(x.double() for x in tensors))
    worst = 0.0
    for result, baseline, want in zip((out, None, *(x.grad for x in inputs)), baselines, exact, strict=True):
        if result is None:  # a method returns no lse
            continue
        shards = [result] * world.size
        dist.all_gather_object(shards, result.detach().cpu().contiguous())  # they may differ in length
        worst = max(
            worst, relative(attention.unshard(shards).double(), want) / relative(baseline.cpu(), want)
        )
    return worst


def relative(result: Tensor | None, want: Tensor | None) -> float:
    """Return the Frobenius norm of a tensor's error, relative to the norm of the exact tensor."""
    assert result is not None and want is not None
    return float((result.double() - want).norm() / want.norm())


def bare_kernel(problem: LayerProblem, device: str = "cpu") -> Callable[..., tuple[Tensor, ...]]:
    """Return `both_ways` of the local kernel over the whole sequence, of q, k, v and dout.

    Masks other than causal and full go in as a table, without hints on tiles to skip.
    """
    kernel, square = choose("auto", replace(problem.on_kernel, device=device)), (problem.seq, problem.seq)
    if problem.seen in (Mask.causal(), Mask.full()):
        return partial(both_ways, kernel, Pattern(square, high=0 if problem.seen == Mask.causal() else None))
    return partial(both_ways, kernel if kernel.abilities.masks else KERNELS["reference"], _table(problem))


def takes_whole(problem: LayerProblem) -> bool:
    """Return whether the bare kernel can take the problem in one call."""
    return problem.seen in (Mask.causal(), Mask.full()) or problem.seq <= TABLE_TOKENS


def _table(problem: LayerProblem) -> Pattern:
    rows = torch.arange(problem.seq)
    return Pattern.from_table(problem.seen.allows(rows, rows))
