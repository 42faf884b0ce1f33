"""The field's methods of context parallelism on the cost model's clock, each by the schedule that it runs.

Rings stand for others' by our programs, in which a rank's own share of a gradient does not travel. Where
others let it travel, their backward makes one hop more than is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_mcore.attention.autotune.cost import (
    COPIES,
    PARCELS,
    CallTime,
    Passes,
    call_time,
    message_bytes,
    slowdown_seconds,
    stretched,
)
from burst_mcore.attention.autotune.costing import pairs_of
from burst_mcore.attention.autotune.lockstep import RoutedPass, Work, play_all
from burst_mcore.attention.autotune.ways import Ranks, route_for, why_not_degree
from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.schedule.actions import Kind, Link, Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.dtypes import TRAINED
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.plan.rows import Row
from burst_mcore.rates import Rates

EAGER = Passes(out=10.0, stays=10.0, travels=10.0, stand_in=0.0)
"""The passes of other projects: 2 bytes of a result are read, 4 of a float32 sum read and written."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a method runs: a ring of groups that share heads, and what it does besides."""

    heads: int = 1
    """Ranks of a group: they exchange tokens for heads before the ring, and back after it."""
    double: bool = False
    """Whether bundles travel between nodes beside those within a node."""
    layout: str = "zigzag"
    direction: Pass = Pass.KV
    exchanges: int = 0
    """Collectives of a pass: all-to-alls of heads, or gathers."""
    gathers: bool = False
    """Whether keys and values are gathered before one kernel call."""


def _ulysses(row: Row) -> Way | str:
    return _usp(replace(row, head_parallel=row.gpus))


def _ring(row: Row) -> Way:
    return Way(layout=_layout(row))


def _double_ring(row: Row) -> Way:
    return Way(double=True, layout=_layout(row))


def _burst(row: Row) -> Way:
    return replace(_double_ring(row), direction=Pass.QUERY)


def _all_gather(row: Row) -> Way:
    return Way(double=True, layout=_layout(row), exchanges=2, gathers=True)


def _usp(row: Row) -> Way | str:
    heads = row.head_parallel or _most_heads(row)
    why_not = why_not_degree(heads, row.ranks, row.heads, row.kv_heads)
    exchanges = 2 if "qkvpack" in row.variant.split() else 4
    return (
        f"head_parallel={heads}: {why_not}"
        if why_not
        else Way(heads=heads, layout=_layout(row), exchanges=exchanges)
    )


def _loongtrain(row: Row) -> Way | str:
    way = _usp(row)
    return way if isinstance(way, str) else replace(way, double=True)


def _most_heads(row: Row) -> int:
    """Return the most ranks of a node that can share the heads."""
    degrees = range(1, row.ranks.intra + 1)
    return max(d for d in degrees if why_not_degree(d, row.ranks, row.heads, row.kv_heads) is None)


METHODS: dict[str, Callable[[Row], Way | str]] = {
    "ulysses": _ulysses,
    "ring": _ring,
    "all-gather": _all_gather,
    "usp": _usp,
    "loongtrain": _loongtrain,
    "double-ring": _double_ring,
    "burst": _burst,
}
"""By name: the way of a row's shapes on its cluster, or the reason why there is none."""
NOT_MODELLED = {
    "hybrid-dcp": "its ranks split documents by a schedule of Megatron's own",
    "magi-a2av": "MagiAttention has a kernel and a dispatch of its own",
    "magi-native": "MagiAttention has a kernel and a dispatch of its own",
}
"""Methods of the field that no schedule here runs, and why."""


def _layout(row: Row) -> str:
    words = {"basic": "contiguous", "zigzag": "zigzag", "stripe": "striped", "strip": "striped"}
    named = [layout for word, layout in words.items() if word in row.variant.split()]
    return named[0] if named else "zigzag" if row.mask == "causal" else "contiguous"


def way_of(row: Row) -> Way | str:
    """Return the way of a row's method, or the reason why the model has none."""
    if row.varlen:
        return "the row does not give the lengths of its documents"
    if row.method in NOT_MODELLED:
        return NOT_MODELLED[row.method]
    if row.method not in METHODS:
        return f"unknown method; known are {', '.join(METHODS)}"
    return METHODS[row.method](row)


def seconds_of(row: Row, way: Way, rates: Rates) -> float:
    """Return the predicted seconds of a row's passes on the slowest rank."""
    if row.passes == "fwd":
        return _seconds(row, way, Pass.FORWARD, rates)
    backward = _seconds(row, way, way.direction, rates)
    return backward if row.passes == "bwd" else backward + _seconds(row, way, Pass.FORWARD, rates)


@dataclass(frozen=True)
class Parts:
    """A pass of a method in parts, one after another: exchanges of heads around a ring of groups."""

    parcels: Mapping[Kind, int]
    """Bytes of a message to one member of the group, by kind."""
    groups: Ranks
    """The places of the ring: all of them, and those of a node."""
    plan: Plan
    ring: RoutedPass
    kernel: float
    """Seconds of the kernel on the busiest rank."""
    after: float
    """Seconds besides, which nothing hides: launches, copies, the kernel after a gather."""


def parts_of(row: Row, way: Way, pass_: Pass, rates: Rates) -> Parts:
    """Return the parts of a pass; on its ring every place sends and receives all, whatever a mask leaves out.

    Each group of ranks that share heads is one place.
    """
    shard = Shard(
        batch=row.batch,
        tokens=-(-row.seq // row.gpus),
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        value_dim=row.head_dim,
        dtype=TRAINED[row.dtype],
        grad_dtype=TRAINED[row.dtype],
    )
    groups = Ranks(row.gpus // way.heads, max(1, row.ranks.intra // way.heads))
    sizes = message_bytes(shard, Route(heads=way.heads), pass_).whole
    parcels = {kind: size for kind, size in sizes.items() if kind in PARCELS}
    pooled = shard.pooled(way.heads)
    route = route_for(1, groups, ring="double" if way.double else "flat", overlap=True)
    pairs = pairs_of(Layout.of(way.layout), row.seen, row.seq, groups.size)
    pairs = pairs.T.contiguous() if pass_ == Pass.QUERY else pairs
    time = call_time(pooled, pass_, rates, EAGER)
    work = Work(pairs, Placement(groups.size), CallTime(0.0) if way.gathers else time, pooled.tokens)
    after = way.exchanges * rates.call + COPIES * sum(parcels.values()) * way.heads / rates.memory
    kernel = work.busiest
    if way.gathers:
        kernel = float(time.seconds(pairs.sum(1), pooled.tokens).max())
        after += kernel + _gathered(pooled, groups.size, pass_) / rates.memory
    plan = _plan(way.layout, row.seq, groups.size)
    ring = RoutedPass(route, pass_, message_bytes(pooled, route, pass_), work)
    return Parts(parcels, groups, plan, ring, kernel, after)


def _seconds(row: Row, way: Way, pass_: Pass, rates: Rates) -> float:
    """Return the seconds of a pass, part by part."""
    parts = parts_of(row, way, pass_, rates)
    (played,) = play_all(parts.plan, [parts.ring], parts.groups.intra, rates)
    slowed = 0.0 if way.gathers else slowdown_seconds(played.sent, rates)
    return _exchanged(parts.parcels, way.heads, row.ranks, rates) + played.seconds + slowed + parts.after


def _exchanged(parcels: Mapping[Kind, int], heads: int, ranks: Ranks, rates: Rates) -> float:
    """Return the seconds of the messages of a pass's all-to-alls, one after another."""
    each, within = sum(parcels.values()), min(heads, ranks.intra)
    near = each * (within - 1) / rates.link(inter=False) * stretched(Link.HEADS, within, rates)
    far = each * (heads - within) / rates.link(inter=True)
    return max(near, far) + (heads > 1) * len(parcels) * rates.latency


def _gathered(shard: Shard, ranks: int, pass_: Pass) -> float:
    """Return the bytes of memory that a gather moves besides the kernel's: K and V, and sums of gradients.

    K and V of all ranks are put in order, dK and dV of all ranks added and put in order.
    """
    elements = ranks * shard.batch * shard.tokens * shard.kv_heads * (shard.head_dim + shard.value_dim)
    ordered = 2 * elements * shard.itemsize
    return ordered if pass_ == Pass.FORWARD else 2 * ordered + EAGER.travels * elements


@lru_cache(maxsize=64)
def _plan(layout: str, n: int, size: int) -> Plan:
    return Plan(Layout.of(layout), Mask.full(), n, Placement(size))
