"""The field's methods of context parallelism on the cost model's clock, each with its schedule.

Rings of other projects run their loops (`loops`); "burst" runs our programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burst_bench.published import loops
from burst_bench.published.loops import OURS, Gather, Loop, Passes
from burst_bench.published.rows import LAYOUTS, Row
from burst_mcore import Layout, Mask
from burst_mcore.attention.choose import COPIES, kernel_seconds
from burst_mcore.attention.geometry.plan import plan_of as plan_of_mask
from burst_mcore.attention.geometry.shard import Placement, Ranks, Shard
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.heads import legal_degrees, why_not_degree
from burst_mcore.attention.schedule.route import Route, route_for
from burst_mcore.dtypes import TRAINED
from burst_mcore.rates import Rates
from burst_plan.machines import CONSTANTS, MACHINES
from burst_plan.simulate import cost
from burst_plan.simulate.cost import message_bytes
from burst_plan.simulate.costing import pairs_of
from burst_plan.simulate.lockstep import KernelWork, RoutedPass, play_all

FITTED = replace(CONSTANTS, call=CONSTANTS.loops)
"""Constants for public rows, which are of other projects' loops."""


@dataclass(frozen=True, kw_only=True)
class MethodPlan:
    """The schedule of a method: a ring of groups that share heads, and other costs."""

    heads: int = 1
    """Ranks of a group: they exchange tokens for heads before the ring, and back after it."""
    double: bool = False
    """Whether blocks rotate between nodes in parallel with those within a node."""
    layout: str = "zigzag"
    direction: Pass = Pass.KV
    exchanges: int = 0
    """Collectives of a pass: all-to-alls of heads, or gathers."""
    gathers: Gather | None = None
    """The gather of all ranks' keys and values before the kernel, if there is one."""
    timed_apart: bool = False
    """Whether the host waits for the device after each pass, which exposes the first launch.

    Rows of passes a second are from feifeibear/long-context-attention@b93c30e. Its benchmark_longctx.py waits
    if Q, K, V are not packed."""
    loop: Loop | None = None
    """The ring of another project; None: our programs."""


def _all_gather(row: Row) -> MethodPlan:
    gathers = loops.MAGI_GATHER.get(_capability(row), loops.TE_GATHER)
    return MethodPlan(double=True, layout=_layout(row), exchanges=2, gathers=gathers)


def _usp(row: Row, heads: int | None, loop: Loop, *, double: bool = False) -> MethodPlan | str:
    """Return a ring, or a double ring, of groups of `heads` ranks; None: as many of a node as can be."""
    degrees = legal_degrees(row.ranks, row.heads, row.kv_heads)
    heads = heads or max(degree for degree in degrees if degree <= row.ranks.intra)
    why_not = why_not_degree(heads, row.ranks, row.heads, row.kv_heads)
    if why_not:
        return f"head_parallel={heads}: {why_not}"
    packed = "qkvpack" in row.variant.split()
    exchanges = 2 * (heads > 1) if packed else 4
    separate = not packed and row.figure == "iterations_per_second"
    return MethodPlan(
        heads=heads, double=double, layout=_layout(row), exchanges=exchanges, loop=loop, timed_apart=separate
    )


def _loop(row: Row) -> Loop:
    """Return the ring: a row with a layout is of ring-flash-attention, another of TransformerEngine."""
    layouts = LAYOUTS.keys() & set(row.variant.split())
    return loops.RING_FLASH if layouts else loops.MAGI_RING.get(_capability(row), loops.TRANSFORMER_ENGINE)


def _capability(row: Row) -> int:
    return MACHINES[row.hardware].capability if row.hardware in MACHINES else 0


METHODS: dict[str, Callable[[Row], MethodPlan | str]] = {
    "ulysses": lambda row: _usp(row, row.gpus, loops.MAGI_ULYSSES.get(_capability(row), loops.DEEPSPEED)),
    "ring": lambda row: MethodPlan(layout=_layout(row), loop=_loop(row)),
    "all-gather": _all_gather,
    "usp": lambda row: _usp(row, row.head_parallel, _loop(row)),
    "loongtrain": lambda row: _usp(
        row, row.head_parallel, loops.MAGI_DOUBLE_RING.get(_capability(row), loops.INTERNEVO), double=True
    ),
    "double-ring": lambda row: MethodPlan(double=True, layout=_layout(row), loop=loops.INTERNEVO),
    "burst": lambda row: MethodPlan(double=True, layout=_layout(row), direction=Pass.QUERY),
}
"""By name: the schedule for a row's shapes on its cluster, or the reason for none."""
NOT_MODELLED = {
    "hybrid-dcp": "its ranks split documents by a schedule of Megatron's own",
    "magi-a2av": "MagiAttention has a kernel and a dispatch of its own",
    "magi-native": "MagiAttention has a kernel and a dispatch of its own",
}
"""Methods of the field without a schedule here, and why."""


def _layout(row: Row) -> str:
    layouts = [layout for word, layout in LAYOUTS.items() if word in row.variant.split()]
    return layouts[0] if layouts else "zigzag" if row.mask == "causal" else "contiguous"


def plan_of(row: Row) -> MethodPlan | str:
    """Return the schedule of a row's method, or the reason why the model has none."""
    if row.varlen:
        return "the row does not give the lengths of its documents"
    if row.method in NOT_MODELLED:
        return NOT_MODELLED[row.method]
    if row.method not in METHODS:
        return f"unknown method; known are {', '.join(METHODS)}"
    return METHODS[row.method](row)


def figure_of(row: Row, rates: Rates) -> float | str:
    """Return the predicted figure of a row, or the reason why the model has none."""
    plan = plan_of(row)
    return plan if isinstance(plan, str) else row.figure_of(seconds_of(row, plan, rates))


def seconds_of(row: Row, plan: MethodPlan, rates: Rates) -> float:
    """Return the predicted seconds of a row's passes on the slowest rank."""
    if row.passes == "fwd":
        return _seconds(row, plan, Pass.FORWARD, rates)
    backward = _seconds(row, plan, plan.direction, rates)
    return backward if row.passes == "bwd" else backward + _seconds(row, plan, Pass.FORWARD, rates)


def _seconds(row: Row, plan: MethodPlan, pass_: Pass, rates: Rates) -> float:
    """Return the seconds of a pass: of the device, part by part, or of the host if it launches longer.

    Exchanges of heads stand around a ring of groups. Each group of ranks that share heads is one place of the
    ring, and every place sends and receives all, whatever a mask leaves out.
    """
    shard, groups = _shard(row), Ranks(row.gpus // plan.heads, max(1, row.ranks.intra // plan.heads))
    sizes, pool = message_bytes(shard, Route(heads=plan.heads), pass_).whole, shard.pooled(plan.heads)
    parcels = [size for kind, size in sizes.items() if kind in cost.PARCELS]
    pairs = pairs_of(Layout.of(plan.layout), row.seen, row.seq, groups.size)
    pairs = pairs.T.contiguous() if pass_ == Pass.QUERY else pairs
    device = plan.timed_apart * rates.call + _exchanged(parcels, plan.heads, row.ranks, rates)
    device += (plan.exchanges > 0) * COPIES * sum(parcels) * plan.heads / rates.memory
    if plan.gathers:
        kernel = _kernel(pool, pass_, rates, plan.gathers.passes)
        work = KernelWork(pairs, Placement(groups.size), torch.zeros_like)
        device += float(kernel(pairs.sum(1)).max()) + _gathered(row, pool, plan.gathers, pass_) / rates.memory
    else:
        loop = plan.loop or loops.RING_FLASH
        repeated = loop.repeats * (pool.heads // pool.kv_heads)
        passes = replace(loop.passes, rotates=loop.passes.rotates + repeated)
        work = KernelWork(pairs, Placement(groups.size), _kernel(pool, pass_, rates, passes))
    ring = _ring_of(plan, groups, pass_, pool, work)
    square = plan_of_mask(Layout.of(plan.layout), Mask.full(), row.seq, Placement(groups.size))
    (timing,) = play_all(square, [ring], groups.intra, rates)
    device += timing.seconds + (0.0 if plan.gathers else cost.slowdown_seconds(timing.sent, rates))
    calls = 2 if plan.gathers else groups.size
    return max(device, cost.host_seconds(calls, plan.exchanges + plan.timed_apart, rates))


def _shard(row: Row) -> Shard:
    """Return the shapes of a rank, whose gradients have the dtype of Q, K and V."""
    dtype = TRAINED[row.dtype]
    return Shard(
        batch=row.batch,
        tokens=-(-row.seq // row.gpus),
        heads=row.heads,
        kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        value_dim=row.head_dim,
        dtype=dtype,
        grad_dtype=dtype,
    )


def _kernel(shard: Shard, pass_: Pass, rates: Rates, passes: Passes) -> Callable[[Tensor], Tensor]:
    """Return the time of kernel calls by their pairs: our kernel's, with the passes of others around them."""
    extra = _bytes_around(shard, pass_, passes) - _bytes_around(shard, pass_, OURS)

    def seconds(pairs: Tensor) -> Tensor:
        rows = (2 * pairs).sqrt().clamp(max=shard.tokens)
        return kernel_seconds(shard, pass_, rates, pairs) + rows * extra / rates.memory

    return seconds


def _bytes_around(shard: Shard, pass_: Pass, passes: Passes) -> float:
    """Return the bytes that passes move for a row of a kernel call, on both sides of it."""
    q, out = shard.batch * shard.heads * shard.head_dim, shard.batch * shard.heads * shard.value_dim
    kv = shard.batch * shard.kv_heads * (shard.head_dim + shard.value_dim)
    if pass_ == Pass.FORWARD:
        return passes.out * out + passes.keys * kv
    if pass_ == Pass.KV:
        return passes.stays * q + passes.rotates * kv
    return passes.rotates * q + passes.stays * kv + passes.stand_in * out


def _ring_of(plan: MethodPlan, groups: Ranks, pass_: Pass, shard: Shard, work: KernelWork) -> RoutedPass:
    """Return the ring of groups: the loop of another project, or our program."""
    if plan.loop is None:
        route = route_for(1, groups, ring="double" if plan.double else "flat", overlap=True)
        return RoutedPass(route, pass_, message_bytes(shard, route, pass_), work)
    route = _windows(groups) if plan.double else Route(intra=groups.size)
    sums = replace(shard, grad_dtype=torch.float32) if plan.loop.float32 else shard
    place = loops.LoopPlace(0, route.nodes, route.intra)
    program = plan.loop.draw(place, gradients=pass_ != Pass.FORWARD)
    return RoutedPass(route, pass_, message_bytes(sums, route, pass_), work, program)


def _windows(groups: Ranks) -> Route:
    """Return a double ring over nodes; within a node, or with a group per node, as many windows as places."""
    if 1 < groups.intra < groups.size:
        return Route(nodes=groups.size // groups.intra, intra=groups.intra)
    nodes = 1
    if groups.intra == 1:
        nodes = max(a for a in range(1, groups.size + 1) if groups.size % a == 0 and a * a <= groups.size)
    return Route(nodes=nodes, intra=groups.size // nodes)


def _exchanged(parcels: Sequence[int], heads: int, ranks: Ranks, rates: Rates) -> float:
    """Return the seconds of the messages of a pass's all-to-alls, one after another, by their bytes."""
    each, members = sum(parcels), min(heads, ranks.intra)
    on_node = each * (members - 1) / rates.link(inter=False) * cost.stretched(Link.HEADS, members, rates)
    between_nodes = each * (heads - members) / rates.link(inter=True)
    return max(on_node, between_nodes) + (heads > 1) * len(parcels) * rates.latency


def _gathered(row: Row, shard: Shard, gathers: Gather, pass_: Pass) -> float:
    """Return the bytes of memory that a gather moves for K and V of all ranks, and for their gradients."""
    elements = row.gpus * shard.batch * shard.tokens * shard.kv_heads * (shard.head_dim + shard.value_dim)
    reads = 1.0 if row.mask == "causal" else 2.0  # of both halves: their queries read all keys, together
    if pass_ == Pass.FORWARD:
        return elements * (gathers.forward + gathers.read * reads)
    repeated = gathers.repeats * (shard.heads // shard.kv_heads)
    return elements * (gathers.backward + (gathers.read + gathers.read_backward) * reads + repeated)
