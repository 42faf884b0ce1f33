"""Bytes that a schedule puts on the wire, and the choice that follows from them. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from burst_mcore.attention.schedule import DATA, Program, Send, flat_ring

STATISTICS_BYTES = 8
"""D and LSE of a query row and head, float32 each."""


@dataclass(frozen=True)
class Shard:
    """The shapes of one rank's share of a call: all that the size of its messages depends on."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes an element of Q, K, V."""
    grad_itemsize: int
    """Bytes an element of a travelling gradient."""

    def bundle_bytes(self, travels: str) -> tuple[int, int]:
        """(data, gradient) bytes of one travelling bundle; travels: "kv" or "query"."""
        rows = self.batch * self.tokens
        if travels == "kv":
            elements = rows * self.kv_heads * (self.head_dim + self.value_dim)
            return elements * self.itemsize, elements * self.grad_itemsize
        statistics = STATISTICS_BYTES if self.itemsize < 8 else 2 * self.itemsize
        data = rows * self.heads * ((self.head_dim + self.value_dim) * self.itemsize + statistics)
        return data, rows * self.heads * self.head_dim * self.grad_itemsize


def wire_bytes(program: Program, data_bytes: int, gradient_bytes: int) -> int:
    """Bytes that one rank sends when it executes `program` with bundles of these sizes."""
    sends = [action for action in program if isinstance(action, Send)]
    return sum(data_bytes if send.channel == DATA else gradient_bytes for send in sends)


def forward_bytes(shard: Shard, size: int) -> int:
    """Bytes each rank sends in forward: 2 N d_kv s (G-1)/G."""
    return wire_bytes(flat_ring(0, size, gradients=False), *shard.bundle_bytes("kv"))


def backward_bytes(shard: Shard, size: int, direction: str) -> int:
    """Bytes each rank sends in backward.

    "query": (G-1)(N/G)(2 d s + 8 H) + N d g; "kv": 2 N d_kv s (G-1)/G + 2 N d_kv g, with N tokens in all, d
    and d_kv the width of all heads, H query heads, s and g bytes an element and a gradient.
    """
    return wire_bytes(flat_ring(0, size, gradients=True), *shard.bundle_bytes(direction))


def cheaper_backward(shard: Shard, size: int) -> str:
    """The direction that moves fewer bytes; "query", the paper's, where they are equal."""
    return min(("query", "kv"), key=lambda direction: backward_bytes(shard, size, direction))
