"""The fewest bytes that any way sends, however the pairs of queries and keys are cut into rectangles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from burst_mcore.attention.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Share:
    """The bytes of one rank's rows, of all heads, in the dtype of Q, K and V."""

    heads: int
    kv_heads: int
    """Heads among which keys and values can be divided; a latent is one."""
    q: float
    out: float
    kv: float
    statistic: float
    """Of LSE, or of D."""
    gradient: float = 2.0
    """The size of a travelling gradient over that of the same numbers of Q, K or V."""
    output: float = 2.0
    """The size of a travelling share of an output, with its LSE, over that of the output."""

    @classmethod
    def of(cls, shard: Shard) -> Self:
        """Return the bytes of a rank's share of a call."""
        return cls(
            heads=shard.heads, kv_heads=shard.carried[0], q=shard.q_bytes, out=shard.out_bytes,
            kv=shard.kv_bytes, statistic=shard.statistic_bytes,
            gradient=shard.grad_itemsize / shard.itemsize, output=shard.share_bytes / shard.out_bytes,
        )  # fmt: skip

    def pooled_kv(self, heads: int) -> float:
        """Return the bytes of K and V of a group's tokens, of the heads of one member."""
        return self.kv * max(1.0, heads / self.kv_heads)


def least(share: Share, places: int) -> float:
    """Return the bytes that a rank sends at least in a pass, however the pairs are cut into rectangles.

    A place is a rank, or a node whose ranks share the bytes. It computes R x C pairs for n = H / h heads, and
    has N / places rows already. Up to H places it is best to take whole heads, R = C = N: Ulysses. Beyond,
    rows and columns in balance give about 4 N d / sqrt(r h G), less the own rows. r h is at most H, so that
    4 N d / sqrt(H G) remains. Every number counts once, in the dtype of Q. A backward that keeps Q, K and V
    moves as many numbers: dO in, dQ, dK and dV out.
    """
    return min(_least_with(share, places, n) for n in range(1, share.heads + 1) if n * places >= share.heads)


def _least_with(share: Share, places: int, n: int) -> float:
    """Return `least` where every place computes for n heads."""
    blocks = share.heads * places / n  # R C, in rows of a place
    row = (share.q + share.out) * n / share.heads
    column = share.kv * max(1 / share.kv_heads, n / share.heads)
    rows = min(max(math.sqrt(blocks * column / row), blocks / places), places)
    return (rows - 1) * row + (blocks / rows - 1) * column
