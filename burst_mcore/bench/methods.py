"""The methods that are compared, behind one interface. A new one is a new entry of METHODS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.runtime.head_exchange import why_not_heads
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.bench.all_gather import all_gather_attention
from burst_mcore.config import BurstConfig
from burst_mcore.explain.problem import Problem

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Differentiable attention of local q, k, v [batch, local sequence, heads, head_dim]."""


@dataclass(frozen=True)
class Method:
    """One way to attend over a sequence that is sharded over ranks."""

    name: str
    layout: str
    """How it wants the sequence dealt."""
    needs: Callable[[Problem, int], str | None]
    """What it lacks for this problem on so many ranks, in words; None if nothing."""
    build: Callable[[Problem, dist.ProcessGroup], Attend]
    """The method over a process group, ready to be called. Collective."""


def _divisible(problem: Problem, ranks: int) -> str | None:
    if problem.seq % (2 * ranks):
        return f"a sequence that is a multiple of {2 * ranks}, got {problem.seq}"
    return None


def _burst(backward: str, *, ulysses: bool = False) -> Callable[[Problem, dist.ProcessGroup], Attend]:
    def build(problem: Problem, group: dist.ProcessGroup) -> Attend:
        topology = Topology.from_group(group)
        config = BurstConfig(backward=backward, head_parallel=topology.size if ulysses else 1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = burst_attention(q, k, v, topology=topology, mask=problem.seen, config=config)
            assert isinstance(out, Tensor)
            return out

        return attend

    return build


def _all_gather(problem: Problem, group: dist.ProcessGroup) -> Attend:
    return lambda q, k, v: all_gather_attention(q, k, v, group=group, mask=problem.seen)


def _ulysses_needs(problem: Problem, ranks: int) -> str | None:
    why_not = why_not_heads(problem.heads, problem.kv_heads, ranks)
    return f"heads that {ranks} ranks can share: {why_not}" if why_not else _divisible(problem, ranks)


def _deepspeed_needs(problem: Problem, ranks: int) -> str | None:
    if find_spec("deepspeed") is None:
        return "the package deepspeed"
    if problem.heads % ranks or problem.kv_heads % ranks:
        heads = f"{problem.heads} and {problem.kv_heads}"
        return f"heads and K/V heads that are multiples of {ranks}, got {heads}"
    return _divisible(problem, ranks)


def _deepspeed(problem: Problem, group: dist.ProcessGroup) -> Attend:
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.sequence.layer import DistributedAttention

    # Else DeepSpeed compiles a shared-memory all-reduce, which attention does not use.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)

    def local(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
        out = burst_attention(q, k, v, topology=Topology.single(), mask=problem.seen)
        assert isinstance(out, Tensor)
        return out

    ulysses = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: ulysses(q, k, v, batch_dim_idx=0)


METHODS = {
    method.name: method
    for method in (
        Method("burst", "zigzag", _divisible, _burst("auto")),
        Method("burst-query", "zigzag", _divisible, _burst("query")),
        Method("burst-kv", "zigzag", _divisible, _burst("kv")),
        Method("burst-ulysses", "zigzag", _ulysses_needs, _burst("auto", ulysses=True)),
        Method("all-gather", "zigzag", _divisible, _all_gather),
        Method("deepspeed-ulysses", "contiguous", _deepspeed_needs, _deepspeed),
    )
}
