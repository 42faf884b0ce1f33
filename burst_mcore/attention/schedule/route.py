"""Routes and schedules: the programs of all ranks for a pass, as data.

One object is printed as a step x rank grid, verified, costed and executed. Passes (`Pass`) differ only in
which bundle travels and whether its gradient follows.

A `Route` is M nodes of L positions. A position is a rank, or a group of ranks that share heads (`Placement`).
A bundle goes round its node, one hop a step. Meanwhile the bundle that entered the node goes on to the next
node, one hop a round. At round i and step j position (m, l) holds the
bundle of (m - i, l - j). With one node this is the flat ring. The gradient of a bundle follows one step
behind it and ends at home: see `double_ring`. Where a position is a group of ranks that share the heads
(head x ring), `with_heads` puts the all-to-all around the ring. Overlap is an order of actions, no more:
`without_overlap` is the same program with every hop waited for at once.

Masks leave some bundles, or rows of them, without a reader. Then a ring may be faster the other way round
(`mirrored`), or a `direct` exchange, where every row goes from its owner to its readers. Both leave out rows
that nobody reads: see `carried`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.geometry.plan import Plan, cached_on_plan
from burst_mcore.attention.schedule.actions import Channel, Kind, Link, Pass, Program
from burst_mcore.attention.schedule.carried import Hops, Itinerary, OfPosition, T
from burst_mcore.attention.schedule.direct import direct
from burst_mcore.attention.schedule.heads import Moves, with_heads
from burst_mcore.attention.schedule.mesh import (
    RowsOfColumn,
    reading_of_columns,
    reading_on_ring,
    with_columns,
)
from burst_mcore.attention.schedule.ring import double_ring, without_overlap


@dataclass(frozen=True)
class Route:
    """The path of the bundles: `nodes` x `intra` positions, each of them `heads` ranks."""

    nodes: int = 1
    intra: int = 1
    heads: int = 1
    overlap: bool = True
    direct: bool = False
    """No ring: every position exchanges with every other."""
    mirrored: bool = False
    """The bundles go from higher positions to lower ones."""
    outer: bool = False
    """The ranks of a position are not neighbours, but one of each run of `positions` neighbours."""
    rings: int = 1
    """Rings side by side, of `nodes` x `intra` places each: the rows of a mesh, see `mesh`. In the backward
    pass where queries travel the mesh is `turned`."""

    @cached_property
    def placement(self) -> Placement:
        """The ranks of each position."""
        return Placement(self.positions, self.heads, self.outer)

    @cached_property
    def positions(self) -> int:
        """Positions in all: places of the ring, or of all rings of a mesh."""
        return self.rings * self.places

    @property
    def places(self) -> int:
        """The size of a ring."""
        return self.nodes * self.intra

    @cached_property
    def turned(self) -> Route:
        """The mesh with its rows and columns exchanged; nodes, where rings go over several, stay whole."""
        if self.nodes > 1:
            return replace(self, nodes=self.rings, rings=self.nodes)
        return replace(self, intra=self.rings, rings=self.intra)

    @property
    def shapes(self) -> tuple[Route, ...]:
        """The routes of all passes."""
        return (self, self.turned) if self.rings > 1 else (self,)

    def of(self, pass_: Pass) -> Route:
        """Return the route of a pass: on a mesh the side that is K and V in one is Q in the other."""
        return self.turned if self.rings > 1 and pass_ == Pass.QUERY else self

    @property
    def has_mirror(self) -> bool:
        """Whether bundles may go the other way round: from two places both ways lead to the other."""
        return self.places > 2 and not self.direct and self.rings == 1

    @property
    def turn(self) -> int:
        """1 if bundles go to higher positions, -1 if they go to lower ones."""
        return -1 if self.mirrored else 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.positions * self.heads

    @property
    def span(self) -> int:
        """Neighbouring ranks over which the ring of a node goes."""
        return self.intra if self.outer else self.intra * self.heads

    def __str__(self) -> str:
        ring = f"ring of {self.intra}" if self.nodes == 1 else f"double ring of {self.nodes} x {self.intra}"
        ring = f"direct exchange of {self.positions}" if self.direct else ring
        ring = f"mesh of {self.rings} x {self.places}: each row a {ring}" if self.rings > 1 else ring
        ring = f"{ring}, mirrored" if self.mirrored else ring
        apart = f" ranks, {self.positions} apart" if self.outer else ""
        heads = f", heads over {self.heads}{apart}" if self.heads > 1 else ""
        return f"{ring}{heads}{'' if self.overlap else ', no overlap'}"


PASSES = {
    Pass.FORWARD: Moves("forward: K, V travel", gradients=False, bundle=True, rows=True),
    Pass.KV: Moves("backward kv: K, V travel, dK, dV follow", gradients=True, bundle=False, rows=True),
    Pass.QUERY: Moves(
        "backward query: Q, dO, D, LSE travel, dQ follows", gradients=True, bundle=True, rows=False
    ),
}
"""The bundles, rows and gradients that each pass moves."""


def program(rank: int, route: Route, pass_: Pass, plan: Plan | None = None) -> Program:
    """Return the program of `rank` in a pass; without a plan, every rank reads every row."""
    route = route.of(pass_ := Pass(pass_))
    if plan is None or plan.everything:
        return _of_all(rank, route, pass_)
    return _of_plan(plan, rank, route, pass_)


@lru_cache(maxsize=256)
def _of_all(rank: int, route: Route, pass_: Pass) -> Program:
    ring: Program = on_ring(route.placement.position(rank) % route.places, route, PASSES[pass_])
    return _around(ring, rank, route, pass_, None)


@cached_on_plan
def _of_plan(plan: Plan, rank: int, route: Route, pass_: Pass) -> Program:
    position, of_queries = route.placement.position(rank), pass_ == Pass.QUERY
    if route.rings > 1:
        way = itinerary_on_mesh(plan, route, position // route.places, of_queries)
        hops = OfPosition(way.reading, position % route.places, way)
    else:
        places = None if route.direct else itinerary(plan, route.nodes, route.intra, route.turn, of_queries)
        hops = OfPosition(plan.reading(of_queries=of_queries), position, places)
    ring = on_ring(position % route.places, route, PASSES[pass_], hops)
    return _around(ring, rank, route, pass_, plan)


@cached_on_plan
def itinerary(plan: Plan, nodes: int, intra: int, turn: int, of_queries: bool) -> Itinerary:
    """Return the itinerary of the bundles: where on a ring each row is read."""
    return Itinerary(plan.reading(of_queries=of_queries), nodes, intra, turn)


@cached_on_plan
def itinerary_on_mesh(plan: Plan, route: Route, ring: int | None, of_queries: bool) -> Itinerary:
    """Return the itinerary of the bundles of one ring of a mesh; None: of all rings."""
    if ring is None:
        reading = reading_of_columns(plan, route.rings, of_queries)
    else:
        reading = reading_on_ring(plan, route.rings, ring, of_queries)
    return Itinerary(reading, route.nodes, route.intra, route.turn)


def _around(ring: Program, rank: int, route: Route, pass_: Pass, plan: Plan | None) -> Program:
    """Return the program of a rank, made from the program of its place on a ring."""
    if route.rings > 1:
        column = RowsOfColumn(route.places, plan, of_queries=pass_ == Pass.QUERY)
        ring = with_columns(ring, route.placement.position(rank), route.rings, column, early=route.overlap)
    if route.heads > 1:
        mesh = route.rings > 1
        ring = with_heads(ring, rank, route.placement, PASSES[pass_], by_part=route.overlap, on_mesh=mesh)
    return ring if route.overlap else without_overlap(ring)


def on_ring(position: int, route: Route, moves: Moves, hops: Hops[T] = Hops()) -> Program[T]:
    """Return the program of a position, between positions; `hops` leaves out rows that nobody reads."""
    if route.direct:
        return direct(position, route.places, gradients=moves.gradients, hops=hops)
    return double_ring(
        position, route.nodes, route.intra, gradients=moves.gradients, hops=hops, turn=route.turn
    )


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks: to print, to verify, to cost. A rank executes its own, `program`."""

    title: str
    route: Route
    programs: tuple[Program, ...]
    plan: Plan | None = None
    """Who reads which rows; None: every position reads every row."""
    queries_travel: bool = False

    @property
    def size(self) -> int:
        return len(self.programs)

    def __str__(self) -> str:
        """Return a grid of step x rank: x<r receives from rank r, x>r sends, [r] computes."""
        return "\n".join([f"{self.title}; {self.route}, {self.size} ranks", *grid(self.programs)])


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
    pass_ = Pass(pass_)
    programs = tuple(program(rank, route, pass_, plan) for rank in range(route.size))
    return Schedule(PASSES[pass_].title, route.of(pass_), programs, plan, queries_travel=pass_ == Pass.QUERY)


WHOLE = "whole"
"""The process group of all ranks, for links that may lead to any of them."""

Communicator = tuple[str, Kind, tuple[int, ...]]
"""(process group: a link or WHOLE, kind of message, the ranks that share the communicator)."""


@lru_cache(maxsize=4096)
def communicator_of(channel: Channel, rank: int, route: Route, intra_size: int) -> Communicator:
    """Return the communicator of a rank's messages on a channel: NCCL runs those of each one after another.

    Args:
        channel: link and kind of the messages.
        rank: one of the ranks of `route`.
        intra_size: ranks of a node.
    """
    size = route.size
    everyone, several_nodes = tuple(range(size)), size > intra_size
    node = everyone[rank - rank % intra_size :][:intra_size]
    if channel.kind == Kind.TOTAL:
        channel = channel._replace(kind=Kind.GRADIENT)  # it follows them
    if channel.link == Link.HEADS:
        group_in_node = not route.outer and intra_size % route.heads == 0
        return Link.HEADS, Kind.DATA, node if group_in_node else everyone
    if channel.link == Link.MESH:
        return Link.MESH, Kind.DATA, everyone
    if channel.link == Link.INTER:
        return Link.INTER, channel.kind, everyone[rank % intra_size :: intra_size]
    ring_in_node = not any(intra_size % shape.span for shape in route.shapes)
    if several_nodes and not ring_in_node:
        return WHOLE, channel.kind, everyone
    return Link.INTRA, channel.kind, node
