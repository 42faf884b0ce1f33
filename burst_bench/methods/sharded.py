"""Attention of a sequence that is sharded over ranks: its cases, and the form of its methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from burst_bench.core import Case, World
from burst_mcore.attention.shard import Shard
from burst_mcore.layout import Layout, shard, unshard
from burst_plan.explain.problem import LayerProblem

AttendedBy = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Differentiable, of local q, k, v [batch, local sequence, heads, head_dim]."""


@dataclass(frozen=True, kw_only=True)
class RingCase(Case, LayerProblem):
    """Attention of a sequence that is sharded over ranks."""

    ranks: int = 4
    seq: int = 16384
    heads: int = 8
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 64
    layout: str = "zigzag"
    """How methods of ours deal the sequence; "auto": as the mask wants it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        Case.__post_init__(self)
        LayerProblem.__post_init__(self)

    @property
    def dealt(self) -> Layout:
        if self.layout == "auto":
            return Layout.for_mask(self.seen, self.seq, self.ranks)
        return Layout.of(self.layout)


@dataclass(frozen=True)
class ShardedAttention:
    """A method of the kind "attention", on one rank."""

    attend: AttendedBy
    shard: Callable[[Tensor], Tensor]
    """This rank's part of a tensor [batch, sequence, ...]."""
    unshard: Callable[[Sequence[Tensor]], Tensor]
    """The whole tensor of the parts of all ranks."""


def dealt(layout: Layout | str, world: World, attend: AttendedBy) -> ShardedAttention:
    """Return a method that wants the sequence in a layout of ours."""
    return ShardedAttention(
        attend,
        partial(shard, dim=1, rank=world.rank, size=world.size, layout=layout),
        partial(unshard, dim=1, layout=layout),
    )


def share_of(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Shard:
    """Return a rank's share of one sequence, values as wide as keys."""
    return Shard(
        batch=1, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim,
        dtype=dtype,
    )  # fmt: skip


def divisible(case: RingCase, device: str) -> str | None:
    """Return the need of a method for shards of one length; None if the case meets the need."""
    unit = 2 * case.ranks
    return f"a sequence that is a multiple of {unit}, got {case.seq}" if case.seq % unit else None
