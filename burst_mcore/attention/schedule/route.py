"""Routes and schedules: the programs of all ranks for a pass, as data.

One object is printed as a step x rank grid, verified, costed and executed. Passes (`Pass`) differ only in
which block rotates and whether its gradient follows.

A `Route` is M nodes of L ring ranks. A ring rank is one rank, or a group that shares heads (`Placement`).
A block rotates within its node in each step, and a node's first block moves to the next node in each round.
At round i and step j ring rank (m, l) holds the block of (m - i, l - j). With one node this is the flat
ring. The gradient of a block follows one step behind it and ends at the owner: see `double_ring`. Where a
ring rank is a group of ranks that share the heads (head x ring), `with_heads` puts the all-to-all around the
ring. Overlap is only an order of actions: `without_overlap` is the same program with a wait after each send.

Under a mask some blocks, or rows of them, have no reader. Then a ring in the other direction (`mirrored`)
may be faster, or a `direct` exchange, where every row goes from its owner to its readers. Both leave out
rows without a reader: see `carried`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from burst_mcore.attention.geometry.plan import Plan, cached_on_plan
from burst_mcore.attention.geometry.shard import Placement, Ranks, Shard
from burst_mcore.attention.schedule.actions import Channel, Kind, Link, Pass, Program
from burst_mcore.attention.schedule.carried import Itinerary, Messages, OfRingRank, T
from burst_mcore.attention.schedule.direct import direct
from burst_mcore.attention.schedule.heads import Moves, with_heads
from burst_mcore.attention.schedule.ring import double_ring, without_overlap


@dataclass(frozen=True)
class Route:
    """The path of the blocks: `nodes` x `intra` ring ranks, each of them `heads` ranks."""

    nodes: int = 1
    intra: int = 1
    heads: int = 1
    overlap: bool = True
    direct: bool = False
    """No ring: every ring rank exchanges with every other (all-to-all P2P)."""
    mirrored: bool = False
    """The blocks go from higher ring ranks to lower ring ranks."""
    outer: bool = False
    """The ranks of a ring rank are `ring_size` apart (Ulysses between nodes), instead of neighbours."""

    @cached_property
    def placement(self) -> Placement:
        return Placement(self.ring_size, self.heads, self.outer)

    @cached_property
    def ring_size(self) -> int:
        """Ring ranks in all: the size of the ring."""
        return self.nodes * self.intra

    @property
    def has_mirror(self) -> bool:
        """Whether the other direction differs: with two ring ranks, both directions lead to the other."""
        return self.ring_size > 2 and not self.direct

    @property
    def turn(self) -> int:
        """The direction of blocks: 1 to higher ring ranks, -1 to lower."""
        return -1 if self.mirrored else 1

    @property
    def size(self) -> int:
        return self.ring_size * self.heads

    @property
    def span(self) -> int:
        """The number of neighbouring ranks that the ring of a node covers."""
        return self.intra if self.outer else self.intra * self.heads

    def __str__(self) -> str:
        ring = f"ring of {self.intra}" if self.nodes == 1 else f"double ring of {self.nodes} x {self.intra}"
        ring = f"direct exchange of {self.ring_size}" if self.direct else ring
        ring = f"{ring}, mirrored" if self.mirrored else ring
        spacing = f" ranks, {self.ring_size} apart" if self.outer else ""
        heads = f", heads over {self.heads}{spacing}" if self.heads > 1 else ""
        return f"{ring}{heads}{'' if self.overlap else ', no overlap'}"


def route_for(degree: int, ranks: Ranks, *, ring: str, overlap: bool, outer: bool = False) -> Route:
    """Return the route of `degree` ranks that share heads: neighbours, or one rank of each ring (`outer`).

    ring: "double", "flat" or "direct". A double ring that nodes cut into unequal parts becomes flat.
    """
    ring_size, outer = ranks.size // degree, outer and 1 < degree < ranks.size
    if ring == "direct":
        return Route(1, ring_size, degree, overlap, direct=ring_size > 1, outer=outer)
    nodes = 1 if ring == "flat" else _nodes_of_ring(ring_size, 1 if outer else degree, ranks.intra)
    return Route(nodes, ring_size // nodes, degree, overlap, outer=outer)


def _nodes_of_ring(ring_size: int, spacing: int, intra: int) -> int:
    """Return the number of nodes of a ring with ring ranks `spacing` ranks from each other."""
    if spacing % intra == 0:
        return ring_size
    return ring_size * spacing // intra if intra % spacing == 0 and ring_size * spacing % intra == 0 else 1


SEARCHED = ("double", "direct")
"""The rings that "auto" searches; a flat ring has no further gain: docs/evidence/decisions.md."""


def rings_of(setting: str, ranks: Ranks) -> tuple[str, ...]:
    """Return the rings that a setting of `BurstConfig.ring` allows."""
    if setting != "auto":
        return (setting,)
    # With two ranks ring and direct exchange differ only in the dtype of gradients, narrower on the ring.
    return SEARCHED if ranks.size > 2 else SEARCHED[:1]


def placements(setting: str, degree: int, ranks: Ranks) -> tuple[bool, ...]:
    """Return the placements of a head group's members to try: neighbours (False), far apart (True), or both.

    setting: `BurstConfig.head_placement`. With several nodes "auto" tries groups over several nodes.
    """
    if degree in (1, ranks.size) or setting == "inner":
        return (False,)
    if setting == "outer":
        return (True,)
    return (False,) if ranks.size == ranks.intra else (False, True)


PASSES = {
    Pass.FORWARD: Moves("forward: K, V rotate", gradients=False, block=True, rows=True),
    Pass.KV: Moves("backward kv: K, V rotate, dK, dV follow", gradients=True, block=False, rows=True),
    Pass.QUERY: Moves(
        "backward query: Q, dO, D, LSE rotate, dQ follows", gradients=True, block=True, rows=False
    ),
}
"""The blocks, rows and gradients that each pass moves."""


def message_bytes(shard: Shard, route: Route, pass_: Pass, *, return_lse: bool = False) -> dict[Kind, int]:
    """Return the bytes of a pass's messages by kind, each of all rows of a ring rank, or of a member."""
    h, pass_ = route.heads, Pass(pass_)
    of_queries, several = pass_ == Pass.QUERY, shard.carried[0] < h
    member = shard.of_member(h)
    data, gradient = shard.pooled(h).block_bytes(of_queries=of_queries)
    q, kv, out, result = member.q_bytes, member.kv_bytes, member.out_bytes, member.result_bytes
    dkv, results = member.gradient_bytes(kv) if several else kv, result if return_lse else out
    through_heads = {
        Pass.FORWARD: {Kind.ROTATING_IN: kv, Kind.STAYING_IN: q, Kind.STAYING_OUT: results},
        Pass.KV: {Kind.STAYING_IN: result, Kind.STAYING_OUT: q, Kind.ROTATING_OUT: dkv},
        Pass.QUERY: {Kind.ROTATING_IN: result, Kind.STAYING_OUT: dkv, Kind.ROTATING_OUT: q},
    }
    summed_again = several and not of_queries  # over the members: see `Call.total_dtype`
    itemsize = shard.grad_itemsize if summed_again else min(shard.itemsize, shard.grad_itemsize)
    total = gradient // shard.grad_itemsize * itemsize
    return {Kind.DATA: data, Kind.GRADIENT: gradient, Kind.TOTAL: total, **through_heads[pass_]}


def program(rank: int, route: Route, pass_: Pass, plan: Plan | None = None) -> Program:
    """Return the program of `rank` in a pass; without a plan, every rank reads every row."""
    pass_ = Pass(pass_)
    if plan is None or plan.everything:
        return _of_all(rank, route, pass_)
    return _of_plan(plan, rank, route, pass_)


@lru_cache(maxsize=256)
def _of_all(rank: int, route: Route, pass_: Pass) -> Program:
    return _around(on_ring(route.placement.ring_rank(rank), route, PASSES[pass_]), rank, route, pass_)


@cached_on_plan
def _of_plan(plan: Plan, rank: int, route: Route, pass_: Pass) -> Program:
    ring_rank, of_queries = route.placement.ring_rank(rank), pass_ == Pass.QUERY
    if plan.reading(of_queries=of_queries).of_all:
        return _of_all(rank, route, pass_)
    places = None if route.direct else itinerary(plan, route.nodes, route.intra, route.turn, of_queries)
    messages = OfRingRank(plan.reading(of_queries=of_queries), ring_rank, places)
    return _around(on_ring(ring_rank, route, PASSES[pass_], messages), rank, route, pass_)


@cached_on_plan
def itinerary(plan: Plan, nodes: int, intra: int, turn: int, of_queries: bool) -> Itinerary:
    """Return the itinerary of the blocks: the places on the ring that read each row."""
    return Itinerary(plan.reading(of_queries=of_queries), nodes, intra, turn)


def _around(ring: Program, rank: int, route: Route, pass_: Pass) -> Program:
    """Return the program of a rank, made from the program of its ring rank."""
    if route.heads > 1:
        ring = with_heads(ring, rank, route.placement, PASSES[pass_], by_part=route.overlap)
    return ring if route.overlap else without_overlap(ring)


def on_ring(ring_rank: int, route: Route, moves: Moves, messages: Messages[T] = Messages()) -> Program[T]:
    """Return the program of a ring rank, between ring ranks; `messages` leaves out rows without a reader."""
    if route.direct:
        return direct(ring_rank, route.ring_size, gradients=moves.gradients, messages=messages)
    return double_ring(
        ring_rank, route.nodes, route.intra, gradients=moves.gradients, messages=messages, turn=route.turn
    )


LEGEND = (
    "x<r: receive buffer x from rank r; x>r: send it; (n): n of its rows; [r]: compute with the block of r",
    "home: own block; data: block of another rank; own share, sum: gradient of the own, of another block",
    "partial: sum of the nodes before; total: complete sum, to the block's owner; x+=d[r]: add r's gradient",
)
"""The symbols and the names of buffers in a printed grid."""


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks: to print, to verify, to cost. A rank executes its own, `program`."""

    title: str
    route: Route
    programs: tuple[Program, ...]
    plan: Plan | None = None
    """The rows that each ring rank reads; None: every ring rank reads every row."""
    queries_rotate: bool = False

    @property
    def size(self) -> int:
        return len(self.programs)

    def __str__(self) -> str:
        """Return a grid of step x rank, with a legend."""
        return "\n".join([f"{self.title}; {self.route}, {self.size} ranks", *grid(self.programs), *LEGEND])


def grid(programs: Sequence[Program]) -> list[str]:
    """Return lines of step x rank, of the actions of each rank's program."""
    cells = [
        {step: "  ".join(map(str, actions)) for step, actions in groupby(program, key=lambda a: a.step)}
        for program in programs
    ]
    steps = sorted({step for column in cells for step in column})
    header = ["step", *(f"rank {rank}" for rank in range(len(programs)))]
    rows = [header, *([str(step), *(column.get(step, "") for column in cells)] for step in steps)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def schedule(route: Route, pass_: Pass, plan: Plan | None = None) -> Schedule:
    """Return all ranks' programs of a pass."""
    programs = tuple(program(rank, route, pass_, plan) for rank in range(route.size))
    return Schedule(PASSES[pass_].title, route, programs, plan, queries_rotate=pass_ == Pass.QUERY)


WHOLE = "whole"
"""The process group of all ranks, for links between any two of them."""

Communicator = tuple[str, Kind, tuple[int, ...]]
"""(process group: a link or WHOLE, kind of message, the ranks that share the communicator)."""


@lru_cache(maxsize=4096)
def communicator_of(channel: Channel, rank: int, route: Route, intra_size: int) -> Communicator:
    """Return the communicator of a rank's messages on a channel: NCCL runs messages of one in their order.

    intra_size: ranks of a node.
    """
    size = route.size
    everyone, several_nodes = tuple(range(size)), size > intra_size
    node = everyone[rank - rank % intra_size :][:intra_size]
    if channel.kind == Kind.TOTAL:
        channel = channel._replace(kind=Kind.GRADIENT)  # a total is sent after all gradients
    if channel.link == Link.HEADS:
        group_in_node = not route.outer and intra_size % route.heads == 0
        return Link.HEADS, Kind.DATA, node if group_in_node else everyone
    if channel.link == Link.INTER:
        return Link.INTER, channel.kind, everyone[rank % intra_size :: intra_size]
    if several_nodes and intra_size % route.span:
        return WHOLE, channel.kind, everyone
    return Link.INTRA, channel.kind, node
