"""Shapes and dtypes of one rank's shard, and the placement of ranks on a ring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The shapes and dtypes of one rank's shard, which fix the bytes of its tensors and messages."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    """Of Q, K, V."""
    grad_dtype: torch.dtype = torch.float32
    """Of a rotating gradient."""
    latent: tuple[int, int] | None = None
    """The widths of the latent and of the rope key of MLA: see `Latent`; None: K and V are inputs."""
    latent_rotates: bool = False
    """Whether the latent rotates, instead of K and V."""

    @property
    def carried(self) -> tuple[int, int]:
        """(heads, width of each head) of the rotating key side: K and V, or the latent."""
        if self.latent is not None and self.latent_rotates:
            return 1, sum(self.latent)
        return self.kv_heads, self.head_dim + self.value_dim

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.tokens, self.heads, self.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes an element of Q, K, V."""
        return self.dtype.itemsize

    @property
    def grad_itemsize(self) -> int:
        """Bytes an element of a rotating gradient."""
        return self.grad_dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows of all sequences of the batch."""
        return self.batch * self.tokens

    @property
    def q_bytes(self) -> int:
        return self.rows * self.heads * self.head_dim * self.itemsize

    @property
    def out_bytes(self) -> int:
        """Bytes of O, or dO."""
        return self.rows * self.heads * self.value_dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of the rotating key side: K and V, or the latent."""
        heads, width = self.carried
        return self.rows * heads * width * self.itemsize

    @property
    def statistic_bytes(self) -> int:
        """Bytes of D, or LSE: in float32, or float64 for float64."""
        return self.rows * self.heads * max(4, self.itemsize)

    @property
    def result_bytes(self) -> int:
        """Bytes of O and LSE."""
        return self.out_bytes + self.statistic_bytes

    def gradient_bytes(self, size: int) -> int:
        """Return the bytes of a rotating gradient of a tensor of `size` bytes in the dtype of Q."""
        return size // self.itemsize * self.grad_itemsize

    def of_member(self, degree: int) -> Shard:
        """Return the shard of this rank's rows and one member's heads, when `degree` ranks share heads."""
        return replace(self, heads=self.heads // degree, kv_heads=max(1, self.kv_heads // degree))

    def pooled(self, degree: int) -> Shard:
        """Return the shard of one rank on the ring, when `degree` ranks pool tokens and share heads."""
        return replace(self.of_member(degree), tokens=self.tokens * degree)

    def block_bytes(self, *, of_queries: bool) -> tuple[int, int]:
        """Return the (data, gradient) bytes of a rotating block: of queries, or of keys and values."""
        if of_queries:
            data = self.q_bytes + self.out_bytes + 2 * self.statistic_bytes
            return data, self.gradient_bytes(self.q_bytes)
        return self.kv_bytes, self.gradient_bytes(self.kv_bytes)


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, `size` in all and `intra` on each node: a Topology without process groups."""

    size: int
    intra: int


Number = TypeVar("Number", int, Tensor)
"""A rank, ring rank or member, or a tensor of many."""


@dataclass(frozen=True)
class Placement:
    """The ranks of `ring_size` head groups, of `heads` members each.

    Inner: a group is `heads` neighbouring ranks, and the ring connects the groups.
    Outer: a ring is `ring_size` neighbouring ranks, and a group has one rank of each ring.
    """

    ring_size: int
    heads: int = 1
    outer: bool = False

    @property
    def size(self) -> int:
        return self.ring_size * self.heads

    def ring_rank(self, rank: Number) -> Number:
        """Return the ring rank of a rank, or of its head group."""
        return rank % self.ring_size if self.outer else rank // self.heads

    def member(self, rank: Number) -> Number:
        """Return the number of a rank in its head group."""
        return rank // self.ring_size if self.outer else rank % self.heads

    def rank(self, ring_rank: Number, member: Number | int) -> Number:
        return ring_rank + member * self.ring_size if self.outer else ring_rank * self.heads + member
