"""Attention on a cluster as programs that processes play: real messages, and waits in the place of kernels.

Our programs are the programs that ranks run; other projects run their own loops (`plan.loops`). Both are
made for the problem on the cluster. Only the bytes of a message and the pace of the clock are scaled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from burst_bench.core import Method, World
from burst_bench.published.methods import Parts, Way, parts_of, programs_of, seconds_of, way_of
from burst_bench.published.rows import Row
from burst_mcore.attention.autotune import decide
from burst_mcore.attention.autotune.candidate import Candidate
from burst_mcore.attention.autotune.choose import best
from burst_mcore.attention.autotune.cost import (
    Sizes,
    exchange_seconds,
    link_class,
    mean_bytes,
    message_bytes,
    slowdown_seconds,
)
from burst_mcore.attention.autotune.costing import pairs_of, work_of
from burst_mcore.attention.autotune.ways import Ranks, legal_degrees
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.schedule.actions import (
    Action,
    Channel,
    Compute,
    Kind,
    Link,
    Pass,
    Program,
    Recv,
    Send,
    Wait,
    hops,
)
from burst_mcore.attention.schedule.route import PASSES, schedule
from burst_mcore.attention.shard import Shard
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates
from burst_plan.explain.verify import verify

LAYOUT, MASK = Layout("zigzag"), Mask.causal()


class Problem(Protocol):
    """Causal attention on a cluster."""

    @property
    def where(self) -> Ranks: ...

    @property
    def share(self) -> Shard: ...

    @property
    def model(self) -> Rates:
        """The rates of the cluster."""
        ...

    @property
    def row(self) -> Row:
        """The problem in the terms of the field's methods."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Part:
    """A part of a call, on one rank."""

    program: Program
    sizes: Sizes
    seconds: Callable[[Compute], float]
    """Of a compute."""
    after: float
    """Seconds at its end, which nothing hides."""


@dataclass(frozen=True)
class Played:
    """A method of the kind "played", on one rank: forward and backward."""

    parts: tuple[Part, ...]
    predicted: float
    """Seconds of the slowest rank on the cluster."""
    kernel: float
    """Seconds of the kernel on the busiest rank."""


@dataclass(frozen=True)
class Scale:
    """The size of the emulation beside the cluster."""

    seconds: float
    """Seconds here for one there."""
    bytes: float
    """Bytes there for one here."""


PROMPT = 1e-3
"""A wait that takes so many seconds, at most, waited for nothing."""


def play(parts: tuple[Part, ...], rank: int, intra: int, scale: Scale) -> dict[str, float]:
    """Play a rank's parts; return the bytes that it would have sent on the cluster, by link.

    A kernel starts when the one before ends, unless a message came later: a device does not wait for a host
    that wakes up late.
    """
    sent = {Link.INTRA: 0.0, Link.INTER: 0.0}
    under_way: dict[Channel, list[tuple[dist.Work, torch.Tensor]]] = defaultdict(list)
    device = _Device()
    for part in parts:
        for channel, actions in hops(part.program):
            if channel is not None:
                under_way[channel] += _posted(actions, part.sizes, scale)
                for action in actions:
                    if isinstance(action, Send):
                        sent[link_class(rank, action.peer, intra)] += part.sizes.of(action)
                continue
            for action in actions:
                if isinstance(action, Wait):
                    device.wait(work for work, _ in under_way.pop(action.channel, ()))
                elif isinstance(action, Compute):
                    device.work(part.seconds(action) * scale.seconds)
        device.work(part.after * scale.seconds)
    return {f"{link} sent": size for link, size in sent.items()}


class _Device:
    """A device that does nothing, for as long as kernels take."""

    def __init__(self) -> None:
        self.free = time.perf_counter()
        """The time from which it can work."""

    def work(self, seconds: float) -> None:
        """Keep the device busy."""
        self.free += seconds
        time.sleep(max(0.0, self.free - time.perf_counter()))

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait for messages: the device goes on when the last has come."""
        began = time.perf_counter()
        for work in works:
            work.wait()
        now = time.perf_counter()
        if now > began + PROMPT:
            self.free = now


def _posted(actions: list[Action], sizes: Sizes, scale: Scale) -> Iterator[tuple[dist.Work, torch.Tensor]]:
    """Start the messages of a hop; the buffers live as long as they are under way."""
    ends, rooms = [], []
    for action in actions:
        assert isinstance(action, (Send, Recv))
        rooms.append(torch.empty(max(1, round(sizes.of(action) / scale.bytes)), dtype=torch.uint8))
        post = dist.isend if isinstance(action, Send) else dist.irecv
        ends.append(dist.P2POp(post, rooms[-1], action.peer, tag=_TAGS.index(action.channel.kind)))
    return zip(dist.batch_isend_irecv(ends), rooms, strict=True)


_TAGS = tuple(Kind)


@lru_cache(maxsize=256)
def costed(problem: Problem, config: BurstConfig) -> Candidate:
    """Return the way that a configuration takes on the cluster, with its cost."""
    share, where = problem.share, problem.where
    return best(decide.costed(config, LAYOUT, where, problem.model, share, MASK, share.tokens * where.size))


AUTO = BurstConfig(ring="auto", head_parallel="auto", backward="auto")
"""All left to the cost model."""


def most_heads(problem: Problem) -> int:
    """Return the most ranks of a node that can share the heads."""
    share, where = problem.share, problem.where
    return max(d for d in legal_degrees(where, share.heads, share.kv_heads) if d <= where.intra)


def ours(problem: Problem, rank: int, config: BurstConfig) -> Played:
    """Return a rank's part in the way that a configuration takes. Rank 0 verifies the schedule."""
    share, where, rates, chosen = problem.share, problem.where, problem.model, costed(problem, config)
    n, route = share.tokens * where.size, chosen.route
    plan, pairs = (
        plan_for(LAYOUT, MASK, n, route.positions, route.heads),
        pairs_of(LAYOUT, MASK, n, where.size),
    )
    parts = []
    for pass_ in (Pass.FORWARD, chosen.direction):
        drawn, sizes = schedule(route, pass_, plan), message_bytes(share, route, pass_)
        if rank == 0:
            verify(drawn, where.intra)
        work = work_of(share, pairs.T.contiguous() if pass_ == Pass.QUERY else pairs, route, pass_, rates)
        sent = mean_bytes(drawn.programs, sizes, where.intra)
        after = exchange_seconds(route, sizes, rates) + slowdown_seconds(sent, rates)
        parts.append(Part(drawn.programs[rank], sizes, partial(work.of_action, rank), after))
    return Played(tuple(parts), chosen.seconds, chosen.compute_seconds)


def fields(problem: Problem, rank: int, name: str, variant: str) -> Played:
    """Return a rank's part in a method of other projects."""
    row = replace(problem.row, method=name, variant=variant)
    way, rates = way_of(row), problem.model
    assert not isinstance(way, str)
    both = [parts_of(row, way, pass_, rates) for pass_ in (Pass.FORWARD, way.direction)]
    played = [part for parts in both for part in _in_turn(parts, way, rank, rates)]
    return Played(tuple(played), seconds_of(row, way, rates), sum(parts.kernel for parts in both))


def _in_turn(parts: Parts, way: Way, rank: int, rates: Rates) -> Iterator[Part]:
    """Yield the exchange into the group, the ring of groups, and the exchange out of the group."""
    moves, ring = PASSES[parts.ring.pass_], parts.ring
    position, member = divmod(rank, way.heads)
    into = [Kind.BUNDLE] * moves.bundle + [Kind.ROWS] * moves.rows
    out = [Kind.RESULT] + [Kind.SUM] * moves.gradients
    programs = _programs(parts, way, rank)
    program = tuple(_of_member(action, way.heads, member) for action in programs[position])
    sent = mean_bytes(programs, ring.sizes, parts.groups.intra)
    slowed = 0.0 if way.gathers else slowdown_seconds(sent, rates)
    exchanged = Sizes(dict(parts.parcels), 1)
    yield Part(exchange(rank, way.heads, into), exchanged, _nothing, 0.0)
    yield Part(program, ring.sizes, partial(ring.work.of_action, position), slowed)
    yield Part(exchange(rank, way.heads, out), exchanged, _nothing, parts.after)


def _programs(parts: Parts, way: Way, rank: int) -> tuple[Program, ...]:
    """Return the programs of all places: another project's loop, or ours, which rank 0 verifies."""
    ring = parts.ring
    if way.loop is not None:
        return tuple(programs_of(way.loop, ring.route, ring.pass_))
    drawn = schedule(ring.route, ring.pass_, parts.plan)
    if rank == 0:
        verify(drawn, parts.groups.intra)
    return drawn.programs


def _nothing(action: Compute) -> float:
    return 0.0


def _of_member(action: Action, heads: int, member: int) -> Action:
    """Return an action of a ring of groups with the ranks of one member at its ends."""
    if isinstance(action, (Send, Recv)):
        return replace(action, peer=action.peer * heads + member)
    return action


def exchange(rank: int, heads: int, kinds: list[Kind]) -> Program:
    """Return an all-to-all of each kind in a group of `heads` neighbours: all start at once."""
    first, member = rank - rank % heads, rank % heads
    shifts, actions = range(1, heads), list[Action]()
    for kind in kinds:
        channel = Channel(Link.HEADS, kind)
        for end, turn in ((Recv, -1), (Send, 1)):
            peers = [first + (member + turn * shift) % heads for shift in shifts]
            actions += [end(0, channel, f"{kind} {peer}", peer) for peer in peers]
    return (*actions, *(Wait(0, Channel(Link.HEADS, kind)) for kind in kinds if heads > 1))


def _ours(config: BurstConfig, problem: Any, world: World) -> Played:
    return ours(problem, world.rank, config)


def _with_heads(problem: Any, world: World) -> Played:
    return ours(problem, world.rank, replace(BURST, head_parallel=most_heads(problem)))


def _fields(name: str, variant: str, problem: Any, world: World) -> Played:
    return fields(problem, world.rank, name, variant)


def _needs(name: str, variant: str, problem: Any, device: str) -> str | None:
    way = way_of(replace(problem.row, method=name, variant=variant))
    return f"heads that its ranks can share: {way}" if isinstance(way, str) else None


BURST = BurstConfig(ring="double", head_parallel=1, backward="query")
"""The paper's method."""
FIELD = {
    "flat ring": ("ring", "basic"),
    "zigzag ring": ("ring", ""),
    "double ring": ("double-ring", "zigzag"),
    "Ulysses": ("ulysses", "zigzag"),
    "USP": ("usp", "zigzag"),
    "all-gather": ("all-gather", "zigzag"),
}
"""Methods of other projects, as `burst_bench.published` has them: name and variant."""
METHODS = (
    *(Method(name, partial(_fields, *way), partial(_needs, *way)) for name, way in FIELD.items()),
    Method("burst", partial(_ours, BURST)),
    Method("burst x heads", _with_heads),
    Method("auto", partial(_ours, AUTO)),
)
