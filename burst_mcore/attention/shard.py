"""The shapes and dtypes of one rank's share of an attention call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's share of a call: everything that the sizes of its tensors and messages depend on."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    """Of Q, K, V."""
    grad_dtype: torch.dtype = torch.float32
    """Of a travelling gradient."""
    latent: tuple[int, int] | None = None
    """The widths of the latent and of the rope key that K and V are made of, if they are: see `Latent`."""
    latent_travels: bool = False
    """Whether the latent travels, and not K and V."""

    @property
    def carried(self) -> tuple[int, int]:
        """The heads, and the width of each, of what travels for keys and values."""
        if self.latent is not None and self.latent_travels:
            return 1, sum(self.latent)
        return self.kv_heads, self.head_dim + self.value_dim

    @property
    def itemsize(self) -> int:
        """Bytes an element of Q, K, V."""
        return self.dtype.itemsize

    @property
    def grad_itemsize(self) -> int:
        """Bytes an element of a travelling gradient."""
        return self.grad_dtype.itemsize

    @property
    def statistic(self) -> int:
        """Bytes of D, or LSE, of a query row and head: float32, or float64 for float64."""
        return max(4, self.itemsize)

    @property
    def result_bytes(self) -> int:
        """Bytes of O and LSE."""
        return self.batch * self.tokens * self.heads * (self.value_dim * self.itemsize + self.statistic)

    def pooled(self, degree: int) -> Shard:
        """Return the share of one rank on the ring, when `degree` ranks pool tokens and share heads."""
        kv_heads = max(1, self.kv_heads // degree)
        return replace(self, tokens=self.tokens * degree, heads=self.heads // degree, kv_heads=kv_heads)

    def bundle_bytes(self, *, of_queries: bool) -> tuple[int, int]:
        """Return the (data, gradient) bytes of a travelling bundle: of queries, or of keys and values."""
        rows = self.batch * self.tokens
        if not of_queries:
            heads, width = self.carried
            elements = rows * heads * width
            return elements * self.itemsize, elements * self.grad_itemsize
        width = (self.head_dim + self.value_dim) * self.itemsize + 2 * self.statistic
        return rows * self.heads * width, rows * self.heads * self.head_dim * self.grad_itemsize
