"""Placement: which ranks share heads at each position of a ring, neighbours or ranks far apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)
"""A rank, position or member, or a tensor of many."""


@dataclass(frozen=True)
class Placement:
    """The ranks of `positions` head groups, of `heads` members each.

    Inner: a group is `heads` neighbouring ranks, and the ring goes from group to group.
    Outer: a ring is `positions` neighbouring ranks, and a group has one rank of each ring.
    """

    positions: int
    heads: int = 1
    outer: bool = False

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.positions * self.heads

    def position(self, rank: Number) -> Number:
        """Return the position on the ring of a rank."""
        return rank % self.positions if self.outer else rank // self.heads

    def member(self, rank: Number) -> Number:
        """Return the number of a rank in its head group."""
        return rank // self.positions if self.outer else rank % self.heads

    def rank(self, position: Number, member: Number | int) -> Number:
        """Return the rank of a member at a position."""
        return position + member * self.positions if self.outer else position * self.heads + member
