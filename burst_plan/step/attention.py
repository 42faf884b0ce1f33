"""Attention of one layer on the clock of the cost model: the schedule, its time, its exposed messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_mcore.attention.choose import AS_FAST, Candidate, Question
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.rates import Rates
from burst_plan.simulate.reason import to_paste
from burst_plan.simulate.search import fastest, taken
from burst_plan.words import mask_of

OPEN = BurstConfig(head_parallel="auto")
"""Settings that leave all but the layout to the cost model."""
LAYOUTS: Sequence[str] = ("zigzag", "contiguous", "striped")
"""Layouts that are compared for masks other than "causal" and "full", for which zigzag is balanced."""
UNSCATTERED = LAYOUTS[:2]
"""Layouts with neighbouring tokens on one rank, as recurrences and convolutions need."""
COMPARED = 64
"""Ranks up to which layouts are compared: each is planned rank by rank, which takes seconds on more."""


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Seconds of a layer's attention on the slowest rank, and the candidate that takes them."""

    forward: float
    backward: float
    kernel: float
    """Seconds of the kernel in both passes, on the busiest rank."""
    layout: str = "zigzag"
    ring: str = "double"
    head_parallel: int = 1
    head_placement: str = "inner"
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
        placement = " outer" * (self.head_placement == "outer")
        heads = f"head_parallel {self.head_parallel}{placement}"
        return f"layout {self.layout}, ring {self.ring}, {heads}, backward {self.direction}"


def attention(
    shard: Shard,
    seq: int,
    ranks: Ranks,
    rates: Rates,
    mask: str = "causal",
    config: BurstConfig | None = None,
    layouts: Sequence[str] = LAYOUTS,
) -> AttentionTime:
    """Return the attention that "auto" chooses where settings leave it open.

    Args:
        mask: an expression of `burst_plan.words`.
        config: settings; None leaves all of it open, the layout too.
        layouts: names of the layouts to compare if settings leave the layout open.

    Raises:
        ValueError: a mask or settings that do not go with the sequence and the ranks.
    """
    settings = [replace(OPEN, layout=layout) for layout in _layouts(mask, seq, ranks.size, layouts)]
    where = shard, seq, ranks, rates, mask
    options = [(each, _best(each, *where)) for each in (settings if config is None else [config])]
    config, best = min(options, key=lambda option: option[1].seconds)
    return AttentionTime(
        forward=best.forward_seconds,
        backward=best.backward_seconds,
        kernel=best.compute_seconds,
        layout=str(Layout.of(config.layout)),
        ring=best.ring,
        head_parallel=best.route.heads,
        head_placement="outer" if best.route.outer else "inner",
        direction=str(best.direction.value),
        nodes=best.route.nodes,
    )


def _layouts(mask: str, seq: int, ranks: int, layouts: Sequence[str]) -> Sequence[str]:
    """Return the layouts to compare; on many ranks the first that is balanced or local."""
    if mask in ("causal", "full") or ranks == 1:
        return layouts[:1]
    if ranks <= COMPARED:
        return layouts
    return ("contiguous",) if mask_of(mask, seq).has_window else layouts[:1]


@lru_cache(maxsize=2048)
def _best(config: BurstConfig, shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str) -> Candidate:
    return fastest(config, _question(config, shard, seq, ranks, rates, mask))


def _question(config: BurstConfig, shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str) -> Question:
    layout = Layout.of(config.layout)
    tokens = layout.padded(seq, ranks.size)
    shard = replace(shard, tokens=tokens // ranks.size)
    return Question(shard, layout, mask_of(mask, tokens), tokens, ranks, rates)


def beside_rule(layout: str, shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str) -> str:
    """Describe the candidate of a call's rule beside the best on a layout, and how much slower it is."""
    config = replace(OPEN, layout=layout)
    where = shard, seq, ranks, rates, mask
    rule, best = taken(config, _question(config, *where)), _best(config, *where)
    words = f'rule of a call with all "auto": {to_paste(rule)}, '
    excess = rule.seconds / best.seconds - 1
    if excess <= AS_FAST - 1:
        return f"{words}as fast (simulated)"
    return f"{words}{excess:.0%} slower (simulated); to paste: {to_paste(best)}"


def keys(mask: str, seq: int) -> float:
    """Return the mean number of keys that a token attends to. Raises ValueError as `attention`."""
    return seq / 2 if mask == "causal" else _pairs_before(mask, seq, seq) / seq


def again(mask: str, seq: int, kept: float) -> float:
    """Return the share of attention's forward before the kept suffix of a sequence."""
    if mask == "causal":
        return (1 - kept) ** 2
    return _pairs_before(mask, seq, round((1 - kept) * seq)) / _pairs_before(mask, seq, seq)


@lru_cache(maxsize=64)
def _pairs_before(mask: str, seq: int, position: int) -> int:
    return int(keys_per_query(mask_of(mask, seq), seq)[:position].sum())
