"""Attention of one layer on the clock of the cost model: the schedule that runs, its time, its exposure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from burst_mcore.attention.autotune.choose import best
from burst_mcore.attention.autotune.search import candidates
from burst_mcore.attention.autotune.ways import RINGS, Ranks, legal_degrees
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.shard import Shard
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Seconds of a layer's attention on the slowest rank, and the way that takes them."""

    forward: float
    backward: float
    kernel: float
    """Seconds of the kernel in both passes, on the busiest rank."""
    ring: str = "double"
    head_parallel: int = 1
    direction: str = "query"
    nodes: int = 1

    @property
    def exposed(self) -> float:
        """Seconds of communication that no kernel hides, in both passes."""
        return max(0.0, self.forward + self.backward - self.kernel)

    @property
    def share(self) -> float:
        """Share of the time in which the kernel runs."""
        return min(1.0, self.kernel / (self.forward + self.backward))

    def __str__(self) -> str:
        return f"ring {self.ring}, head_parallel {self.head_parallel}, backward {self.direction}"


@lru_cache(maxsize=512)
def attention(
    shard: Shard,
    seq: int,
    ranks: Ranks,
    rates: Rates,
    *,
    layout: str = "zigzag",
) -> Attention:
    """Return the attention that "auto" chooses among rings for a causal mask.

    Raises:
        ValueError: the sequence cannot be dealt over the ranks in this layout.
    """
    dealt = Layout.of(layout)
    padded = dealt.padded(seq, ranks.size)
    shard = replace(shard, tokens=padded // ranks.size)
    degrees = legal_degrees(ranks, shard.heads, shard.kv_heads)
    rings = tuple(word for word in RINGS if word != "direct")  # under a causal mask every rank reads others
    chosen = best(
        candidates(
            shard, dealt, Mask.causal(), padded, ranks, rates,
            overlap=True, rings=rings, degrees=tuple(degrees), directions=(Pass.QUERY, Pass.KV),
        )
    )  # fmt: skip
    return Attention(
        forward=chosen.forward_seconds,
        backward=chosen.backward_seconds,
        kernel=chosen.compute_seconds,
        ring=chosen.ring,
        head_parallel=chosen.route.heads,
        direction=str(chosen.direction.value),
        nodes=chosen.route.nodes,
    )
