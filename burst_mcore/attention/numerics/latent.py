"""Multi-latent attention (MLA): K and V expanded from a latent and a rope key, and their gradients.

The latent and the rope key of a token are a few hundred numbers; K and V of all heads are many thousands. So
the latent rotates, and each rank expands the rows that it reads. The gradient of the latent rotates likewise.

Letters: B batch, S rows, H heads, R width of the latent, Dk and Dr widths of a key without position and of
the rope key, Dv width of a value. Queries and whole keys have head dim D = Dk + Dr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, gather, relative_to
from burst_mcore.attention.numerics.merge import Block, GradientSums, KernelResults, KeyBlocks
from burst_mcore.dtypes import wide


class Latent(NamedTuple):
    """Keys and values of multi-latent attention (MLA), before the up-projection.

    Head h has the keys [compressed @ weight[h, :, :Dk], rope_key] and the values
    compressed @ weight[h, :, Dk:].
    """

    compressed: Tensor
    """[B, S, R]: the latent, normalized, in the dtype of q."""
    rope_key: Tensor
    """[B, S, 1, Dr]: the rotary part of a key, the same for all heads."""
    weight: Tensor
    """[H, R, Dk + Dv]: the up-projection of the heads of q. Its gradient is a partial sum over the keys that
    this rank's queries attend to: all-reduce it over the ring, like gradients of weights."""
    rotates: str = "auto"
    """The tensors on the ring: the latent ("on"), K and V ("off"), or the latent where the cost model
    predicts a gain ("auto")."""


class Expansion:
    """The up-projection of some heads: K and V of a latent c and rope key r, and the gradients of both.

    With W = [W_k | W_v] of a head: K = [c W_k, r], V = c W_v. Summed over heads, dc = dK_c W_k^T + dV W_v^T
    and dr = dK_r; dW_k = c^T dK_c, dW_v = c^T dV. Gradients of weights are summed over all rows, in at least
    float32.
    """

    def __init__(self, up: Tensor, heads: range, value_dim: int) -> None:
        """Take the weights of `heads`; up: [all heads, R, Dk + Dv], value_dim: Dv."""
        self._up, self._heads, self._key = up, heads, up.shape[2] - value_dim
        of_heads = up[heads.start : heads.stop].transpose(1, 2)  # [H, Dk + Dv, R]
        parts = of_heads[:, : self._key], of_heads[:, self._key :]
        self._weights = tuple(part.flatten(0, 1) for part in parts)
        self._sums: list[Tensor] = []

    def expand(self, compressed: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return (k [B, S, H, D], v [B, S, H, Dv]) of compressed [B, S, 1, R], rope_key [B, S, 1, Dr]."""
        many = len(self._heads)
        keys, values = (
            (compressed.flatten(2) @ weight.T).unflatten(2, (many, len(weight) // many))
            for weight in self._weights
        )
        return torch.cat([keys, rope_key.expand(-1, -1, many, -1)], 3), values

    def gradients(self, compressed: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the latent [B, S, 1, R] and of the rope key [B, S, 1, Dr].

        Both are in at least float32. Weight gradients are added to the sum of earlier rows.
        """
        batch, rows = compressed.shape[:2]
        of_weights = [x.reshape(batch * rows, x.shape[2] * x.shape[3]) for x in (dk[..., : self._key], dv)]
        of_keys, of_values = map(_product, of_weights, self._weights)
        inputs = compressed.reshape(batch * rows, compressed.shape[3])
        shares = [_product(x.T, inputs) for x in of_weights]
        if self._sums:
            for total, share in zip(self._sums, shares, strict=True):
                total.add_(share)
        else:
            self._sums = shares
        rope = dk[..., self._key :].sum(2, keepdim=True, dtype=wide(dk.dtype))
        return (of_keys + of_values).view(batch, rows, 1, compressed.shape[3]), rope

    def weight_gradient(self) -> Tensor:
        """Return the gradient of `up`, summed so far; zeros for other heads, and without any rows."""
        gradient = self._up.new_zeros(self._up.shape)
        places = (slice(0, self._key), slice(self._key, None)) if self._sums else ()
        for total, place in zip(self._sums, places, strict=True):
            of_heads = total.unflatten(0, (len(self._heads), -1)).transpose(1, 2)
            gradient[self._heads.start : self._heads.stop, :, place] = of_heads
        return gradient


class _Expanded:
    """Expanded rows of a latent and its rope key: K and V, and the sums of their gradients."""

    def __init__(self, expansion: Expansion, latent: Block, rows: Rows) -> None:
        self._expansion, self._latent, self._rows = expansion, latent, rows
        self.wants_gradients = latent.sums is not None
        self._compressed, rope_key = (gather(x, relative_to(latent.rows, rows)) for x in latent.tensors)
        keys: KernelResults = expansion.expand(self._compressed, rope_key)
        self._sums = GradientSums(keys, rows)
        self.keys = Block(rows, keys, self._sums)

    def hand_on(self, span: range | None = None) -> None:
        """Add the gradients of K and V, of a span or of all expanded rows (None), to those of the latent.

        A span needs all rows expanded. Weight gradients are added to the sum of earlier rows.
        """
        rows, compressed, sums = self._rows, self._compressed, self._sums
        if span is None:
            gradients = sums.results()
        else:
            rows, compressed = (span,), gather(compressed, (span,))
            gradients = sums.room(compressed.dtype, len(span))
            sums.put(span, gradients)
        self._latent.take(rows, self._expansion.gradients(compressed, *gradients))


class LatentBlocks(KeyBlocks):
    """K and V of the blocks of one pass, expanded from received latents."""

    def __init__(self, expansion: Expansion) -> None:
        self._expansion = expansion
        self._expanded: dict[int, _Expanded] = {}

    def block(self, owner: int, received: Block, read: Callable[[], Rows]) -> Block:
        if owner not in self._expanded:
            self._expanded[owner] = _Expanded(self._expansion, received, read())
        return self._expanded[owner].keys

    def settle(self, owner: int, span: range) -> None:
        if owner in self._expanded:
            self._expanded[owner].hand_on(span)

    def close(self, owner: int) -> None:
        expanded = self._expanded.pop(owner, None)
        if expanded and expanded.wants_gradients:
            expanded.hand_on()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in at least float32."""
    if a.dtype == wide(a.dtype):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide(a.dtype))
    return a.float() @ b.float()
