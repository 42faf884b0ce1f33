"""Attention of one layer on the clock of the cost model: the schedule, its time, its exposed messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_mcore.attention.choose import AS_FAST, Question
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
    if config is not None:
        return _by(config, shard, seq, ranks, rates, mask)
    settings = (replace(OPEN, layout=layout) for layout in _layouts(mask, seq, ranks.size, layouts))
    return min(
        (_by(one, shard, seq, ranks, rates, mask) for one in settings),
        key=lambda one: one.forward + one.backward,
    )


def _layouts(mask: str, seq: int, ranks: int, layouts: Sequence[str]) -> Sequence[str]:
    """Return the layouts to compare; on many ranks the first that is balanced or local."""
    if mask in ("causal", "full") or ranks == 1:
        return layouts[:1]
    if ranks <= COMPARED:
        return layouts
    return ("contiguous",) if mask_of(mask, seq).has_window else layouts[:1]


@lru_cache(maxsize=2048)
def _by(config: BurstConfig, shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str) -> AttentionTime:
    chosen = fastest(config, _question(config.layout, shard, seq, ranks, rates, mask))
    return AttentionTime(
        forward=chosen.forward_seconds,
        backward=chosen.backward_seconds,
        kernel=chosen.compute_seconds,
        layout=str(Layout.of(config.layout)),
        ring=chosen.ring,
        head_parallel=chosen.route.heads,
        head_placement="outer" if chosen.route.outer else "inner",
        direction=str(chosen.direction.value),
        nodes=chosen.route.nodes,
    )


def _question(
    layout: Layout | str, shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str
) -> Question:
    sharded = Layout.of(layout)
    padded = sharded.padded(seq, ranks.size)
    shard = replace(shard, tokens=padded // ranks.size)
    return Question(shard, sharded, mask_of(mask, padded), padded, ranks, rates)


def beside_rule(runs: AttentionTime, shard: Shard, seq: int, ranks: Ranks, rates: Rates, mask: str) -> str:
    """Describe the candidate of a call's rule on the same layout, and how much slower it is."""
    question = _question(runs.layout, shard, seq, ranks, rates, mask)
    taken_way = taken(replace(OPEN, layout=runs.layout), question)
    route, behind = taken_way.route, taken_way.seconds / (runs.forward + runs.backward) - 1
    placement = "outer" if route.outer else "inner"
    plan = to_paste(taken_way.ring, route.heads, placement, taken_way.direction.value)
    words = f'rule of a call with all "auto": {plan}, '
    if behind <= AS_FAST - 1:
        return f"{words}as fast (simulated)"
    settings = to_paste(runs.ring, runs.head_parallel, runs.head_placement, runs.direction)
    return f"{words}{behind:.0%} slower (simulated); to paste: {settings}"


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
