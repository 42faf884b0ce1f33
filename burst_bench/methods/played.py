"""Attention on a cluster as programs that processes play: real messages, and waits in the place of kernels.

Our programs are the programs that ranks run; other projects run their own loops (`published.loops`). Both are
made for the problem on the cluster. Only the bytes of a message and the pace of the clock are scaled.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from burst_bench.core import Case, Method, World, add
from burst_bench.methods.attention import share_of
from burst_bench.published import methods as published
from burst_bench.published.rows import Row
from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.candidates import Question, Ranks
from burst_mcore.attention.choose import Candidate
from burst_mcore.attention.geometry.plan import Plan, plan_for
from burst_mcore.attention.schedule import actions as does
from burst_mcore.attention.schedule.actions import Compute, Kind, Link, Pass, Program, Recv, Send, Wait
from burst_mcore.attention.schedule.route import PASSES, Route, schedule
from burst_mcore.attention.shard import Shard
from burst_mcore.rates import Rates
from burst_plan.explain.predict import cluster
from burst_plan.explain.verify import verify
from burst_plan.machines import MACHINES
from burst_plan.simulate import cost
from burst_plan.simulate.costing import pairs_of, work_of
from burst_plan.simulate.search import fastest

LAYOUT, MASK = Layout("zigzag"), Mask.causal()


class PlayedCase(Case):
    """Causal attention on a cluster."""

    cluster: str = "4x8"
    """Nodes x GPUs of a node; with a machine before a colon, in place of the A800."""
    tokens: int = 32768
    """Of a rank."""
    heads: int = 40
    kv_heads: int = 40
    head_dim: int = 128
    nic: float = 1.0
    """Share of the NIC's rate that is there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.nic <= 1:
            raise ValueError(f"nic must be a share above 0 and at most 1, got {self.nic:g}")
        if self.where.size < 2:
            raise ValueError(f"cluster must have 2 ranks or more, got {self.cluster}")

    @property
    def where(self) -> Ranks:
        return cluster(self.cluster)[0]

    @property
    def model(self) -> Rates:
        """The rates of the cluster, with its slower NIC."""
        rates = (cluster(self.cluster)[1] or MACHINES["A800"]).rates
        return replace(rates, inter=rates.inter * self.nic)

    @property
    def share(self) -> Shard:
        return share_of(self.tokens, self.heads, self.kv_heads, self.head_dim, torch.bfloat16)

    @property
    def row(self) -> Row:
        """The problem in the terms of the field's methods."""
        where = self.where
        return Row(
            hardware="A800", gpus=where.size, gpus_per_node=where.intra, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=self.head_dim, batch=1, seq=self.tokens * where.size,
            mask="causal", passes="fwd+bwd", method="ring", tflops=1.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A part of a call, on one rank."""

    program: Program
    sizes: cost.Sizes
    seconds: Callable[[Compute], float] = lambda action: 0.0
    """Of a compute."""
    after: float = 0.0
    """Seconds at its end, which nothing hides."""


@dataclass(frozen=True)
class Played:
    """A method of the kind "played", on one rank: forward and backward."""

    parts: tuple[Part, ...]
    predicted: float
    """Seconds of the slowest rank on the cluster."""
    kernel: float
    """Seconds of the kernel on the busiest rank."""

    def sent(self, rank: int, intra: int) -> dict[Link, float]:
        sent = [cost.link_bytes(part.program, rank, part.sizes, intra) for part in self.parts]
        return {link: sum(size.get(link, 0.0) for size in sent) for link in (Link.INTRA, Link.INTER)}


@dataclass(frozen=True)
class Scale:
    """The size of the emulation beside the cluster."""

    seconds: float
    """Seconds here for one there."""
    bytes: float
    """Bytes there for one here."""


PROMPT = 1e-3
"""A wait that takes so many seconds, at most, waited for nothing."""


def play(parts: tuple[Part, ...], scale: Scale) -> None:
    """Play a rank's parts.

    A kernel starts when the one before ends, unless a message came later: a device does not wait for a host
    that wakes up late.
    """
    under_way: dict[does.Channel, list[tuple[dist.Work, torch.Tensor]]] = defaultdict(list)
    device = _Device()
    for part in parts:
        for channel, actions in does.by_hop(part.program):
            if channel is not None:
                under_way[channel] += _posted(actions, part.sizes, scale)
                continue
            for action in actions:
                if isinstance(action, Wait):
                    device.wait(work for work, _ in under_way.pop(action.channel, ()))
                elif isinstance(action, Compute):
                    device.work(part.seconds(action) * scale.seconds)
        device.work(part.after * scale.seconds)


class _Device:
    """A device that does nothing, for as long as kernels take."""

    def __init__(self) -> None:
        self.free = time.perf_counter()
        """The time from which it can work."""

    def work(self, seconds: float) -> None:
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


def _posted(
    actions: list[does.Action], sizes: cost.Sizes, scale: Scale
) -> Iterator[tuple[dist.Work, torch.Tensor]]:
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
def costed(case: PlayedCase, config: BurstConfig) -> Candidate:
    """Return the way that a configuration takes on the cluster, with its cost."""
    share, where = case.share, case.where
    return fastest(config, Question(share, LAYOUT, MASK, share.tokens * where.size, where, case.model))


def drawn(route: Route, pass_: Pass, plan: Plan, rank: int, intra: int) -> tuple[Program, ...]:
    """Return our programs of all ranks, which rank 0 verifies on nodes of `intra` ranks."""
    every = schedule(route, pass_, plan)
    if rank == 0:
        verify(every, intra)
    return every.programs


def ours(config: BurstConfig, case: PlayedCase, world: World) -> Played:
    """Return a rank's part in the way that a configuration takes."""
    share, where, rates, chosen = case.share, case.where, case.model, costed(case, config)
    n, route = share.tokens * where.size, chosen.route
    plan = plan_for(LAYOUT, MASK, n, route.positions, route.heads)
    pairs, parts = pairs_of(LAYOUT, MASK, n, where.size), []
    for pass_ in (Pass.FORWARD, chosen.direction):
        programs = drawn(route, pass_, plan, world.rank, where.intra)
        sizes = cost.message_bytes(share, route, pass_)
        work = work_of(share, pairs.T.contiguous() if pass_ == Pass.QUERY else pairs, route, pass_, rates)
        sent = cost.mean_bytes(programs, sizes, where.intra)
        after = cost.exchange_seconds(route, sizes, rates) + cost.slowdown_seconds(sent, rates)
        parts.append(Part(programs[world.rank], sizes, partial(work.of_action, world.rank), after))
    return Played(tuple(parts), chosen.seconds, chosen.compute_seconds)


def ours_with_heads(case: PlayedCase, world: World) -> Played:
    """Return a rank's part in the paper's method, heads shared in a node by as many ranks as can."""
    return ours(replace(BURST, head_parallel=published.most_heads(case.row)), case, world)


def fields(name: str, variant: str, case: PlayedCase, world: World) -> Played:
    """Return a rank's part in a method of other projects."""
    row = replace(case.row, method=name, variant=variant)
    way, rates = published.way_of(row), case.model
    assert not isinstance(way, str)
    both = [published.parts_of(row, way, pass_, rates) for pass_ in (Pass.FORWARD, way.direction)]
    played = [part for parts in both for part in _in_turn(parts, way, world.rank, rates)]
    return Played(tuple(played), published.seconds_of(row, way, rates), sum(parts.kernel for parts in both))


def _in_turn(parts: published.Parts, way: published.MethodWay, rank: int, rates: Rates) -> Iterator[Part]:
    """Yield the exchange into the group, the ring of groups, and the exchange out of the group."""
    moves, ring = PASSES[parts.ring.pass_], parts.ring
    position, member = divmod(rank, way.heads)
    into = [Kind.BUNDLE] * moves.bundle + [Kind.ROWS] * moves.rows
    out = [Kind.RESULT] + [Kind.SUM] * moves.gradients
    if way.loop is None:
        programs = drawn(ring.route, ring.pass_, parts.plan, rank, parts.groups.intra)
    else:
        programs = tuple(published.programs_of(way.loop, ring.route, ring.pass_))
    program = tuple(  # the ends of its messages are the ranks of one member
        replace(action, peer=action.peer * way.heads + member) if isinstance(action, (Send, Recv)) else action
        for action in programs[position]
    )
    sent = cost.mean_bytes(programs, ring.sizes, parts.groups.intra)
    slowed = 0.0 if way.gathers else cost.slowdown_seconds(sent, rates)
    exchanged = cost.Sizes(dict(parts.parcels), 1)
    yield Part(exchange(rank, way.heads, into), exchanged)
    yield Part(program, ring.sizes, partial(ring.work.of_action, position), slowed)
    yield Part(exchange(rank, way.heads, out), exchanged, after=parts.after)


def exchange(rank: int, heads: int, kinds: list[Kind]) -> Program:
    """Return an all-to-all of each kind in a group of `heads` neighbours: all start at once."""
    first, member = rank - rank % heads, rank % heads
    shifts, actions = range(1, heads), list[does.Action]()
    for kind in kinds:
        channel = does.Channel(Link.HEADS, kind)
        for end, turn in ((Recv, -1), (Send, 1)):
            peers = [first + (member + turn * shift) % heads for shift in shifts]
            actions += [end(0, channel, f"{kind} {peer}", peer) for peer in peers]
    return (*actions, *(Wait(0, does.Channel(Link.HEADS, kind)) for kind in kinds if heads > 1))


def _needs(name: str, variant: str, case: PlayedCase, device: str) -> str | None:
    way = published.way_of(replace(case.row, method=name, variant=variant))
    return f"heads that its ranks can share: {way}" if isinstance(way, str) else None


AUTO = BurstConfig(ring="auto", head_parallel="auto", backward="auto")
"""All left to the cost model."""
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
add(
    "played",
    *(Method(name, partial(fields, *way), partial(_needs, *way)) for name, way in FIELD.items()),
    Method("burst", partial(ours, BURST)),
    Method("burst x heads", ours_with_heads),
    Method("auto", partial(ours, AUTO)),
)
