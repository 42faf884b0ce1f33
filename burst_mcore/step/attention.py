"""Attention of one layer on the clock of the cost model: the schedule that runs, its time, its exposure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from burst_mcore.attention.autotune.choose import best
from burst_mcore.attention.autotune.search import contenders
from burst_mcore.attention.autotune.ways import RINGS, Ranks, legal_degrees
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.shard import Shard
from burst_mcore.layout import Layout
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.mask.words import mask_of
from burst_mcore.rates import Rates

LAYOUTS = ("zigzag", "contiguous", "striped")
"""Layouts that are tried for masks other than "causal" and "full", for which zigzag is balanced."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Seconds of a layer's attention on the slowest rank, and the way that takes them."""

    forward: float
    backward: float
    kernel: float
    """Seconds of the kernel in both passes, on the busiest rank."""
    layout: str = "zigzag"
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
        return min(1.0, self.kernel / max(self.kernel, self.forward + self.backward))

    def __str__(self) -> str:
        ways = f"head_parallel {self.head_parallel}, backward {self.direction}"
        return f"layout {self.layout}, ring {self.ring}, {ways}"


def attention(shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str = "causal") -> Attention:
    """Return the attention that "auto" chooses, on the layout that is fastest for a mask in words.

    Raises:
        ValueError: a mask that does not go with the sequence, or a sequence that ranks cannot be dealt.
    """
    layouts = LAYOUTS[:1] if mask in ("causal", "full") or ranks.size == 1 else LAYOUTS
    return min((_on(shard, seq, ranks, rates, mask, layout) for layout in layouts), key=_seconds)


def _seconds(one: Attention) -> float:
    return one.forward + one.backward


@lru_cache(maxsize=2048)
def _on(shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str, layout: str) -> Attention:
    dealt = Layout.of(layout)
    padded = dealt.padded(seq, ranks.size)
    shard = replace(shard, tokens=padded // ranks.size)
    degrees = legal_degrees(ranks, shard.heads, shard.kv_heads)
    every = mask in ("causal", "full")  # then every rank reads others
    chosen = best(
        contenders(
            shard, dealt, mask_of(mask, padded), padded, ranks, rates, overlap=True,
            rings=tuple(ring for ring in RINGS if not every or ring != "direct"),
            degrees=tuple(degrees), directions=(Pass.QUERY, Pass.KV),
        )[0]
    )  # fmt: skip
    return Attention(
        forward=chosen.forward_seconds,
        backward=chosen.backward_seconds,
        kernel=chosen.compute_seconds,
        layout=layout,
        ring=chosen.ring,
        head_parallel=chosen.route.heads,
        direction=str(chosen.direction.value),
        nodes=chosen.route.nodes,
    )


def keys(mask: str, seq: int) -> float:
    """Return how many keys a token attends to, on average. Raises ValueError as `attention`."""
    return seq / 2 if mask == "causal" else _pairs_before(mask, seq, seq) / seq


def again(mask: str, seq: int, kept: float) -> float:
    """Return the share of attention's forward that comes before the kept end of a sequence."""
    if mask == "causal":
        return (1 - kept) ** 2
    return _pairs_before(mask, seq, round((1 - kept) * seq)) / _pairs_before(mask, seq, seq)


@lru_cache(maxsize=64)
def _pairs_before(mask: str, seq: int, position: int) -> int:
    return int(keys_per_query(mask_of(mask, seq), seq)[:position].sum())
