"""How a ring is added: one is written, registered, printed, verified, and run against float64.

The ring of this file is a direct exchange without overlap. All blocks arrive before the first tile, each in a
buffer of its own. Four places know a ring; docs/evidence/architecture.md names their files:

1. The writer makes the program of one ring rank: `eager`, in a file of attention/schedule.
2. A `Route` says which ring it is, and whether its mirror image differs (`has_mirror`): `Eager`.
3. `route.on_ring` asks the writer for the program of such a route.
4. `route.route_for` makes the route of some ranks for a word of `BurstConfig.ring`. A ring that stays
   gets a word of its own in config.RINGS; this one takes that of the direct exchange.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch.distributed as dist
from dense import dense, error, problem
from ranks import on_ranks
from sharded import whole_results
from test_simulation import simulate

from burst_mcore import BurstConfig, Layout, Mask, Topology
from burst_mcore.attention import choose, resolve
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.schedule import route as routes
from burst_mcore.attention.schedule.actions import (
    HOME,
    Action,
    Compute,
    Kind,
    Pass,
    Program,
    Recv,
    Send,
    Wait,
)
from burst_mcore.attention.schedule.carried import Messages
from burst_mcore.attention.schedule.direct import direct
from burst_mcore.attention.schedule.route import Route, schedule
from burst_plan.explain.verify import verify

N = 96
MASKS = [Mask.causal(), Mask.window(9, 0), Mask.causal() & Mask.documents([0, 20, 50, N])]


def eager(ring_rank: int, size: int, *, gradients: bool, messages: Messages = Messages()) -> Program:
    """The program of a ring rank.

    Rows are received into `data<t>`, t being the distance to their owner. All messages of data are posted in
    step 0, and waited for before the first compute. Gradients go back as in a direct exchange.
    """
    started: list[Action] = []
    waits: list[Action] = []
    rest: list[Action] = []
    for action in direct(ring_rank, size, gradients=gradients, messages=messages):
        match action:
            case Recv(channel=channel) if channel.kind == Kind.DATA:
                started.append(replace(action, step=0, buffer=f"{Kind.DATA}{channel.distance}"))
            case Send(channel=channel) if channel.kind == Kind.DATA:
                started.append(replace(action, step=0))
            case Wait(channel=channel) if channel.kind == Kind.DATA:
                waits.append(replace(action, step=0))
            case Compute(step=distance):
                rest.append(replace(action, buffer=f"{Kind.DATA}{distance}" if distance else HOME))
            case _:
                rest.append(action)
    return (*started, *waits, *rest)


@dataclass(frozen=True)
class Eager(Route):
    """The route of this ring: on one node, as a direct exchange."""

    @property
    def has_mirror(self) -> bool:
        return False  # every row goes straight to its readers


@pytest.fixture
def registered(monkeypatch) -> Iterator[list[Route]]:
    """Put the ring in; the list gets each route that `route_for` makes of it."""
    on_ring, route_for, made = routes.on_ring, routes.route_for, []

    def on_this_ring(ring_rank, route, moves, messages=Messages()):
        if isinstance(route, Eager):
            return eager(ring_rank, route.ring_size, gradients=moves.gradients, messages=messages)
        return on_ring(ring_rank, route, moves, messages)

    def route_of(degree, ranks, *, ring, **how):
        if ring != "direct":
            return route_for(degree, ranks, ring=ring, **how)
        made.append(Eager(1, ranks.size // degree, degree, how["overlap"]))
        return made[-1]

    monkeypatch.setattr(routes, "on_ring", on_this_ring)
    for module in (choose, resolve):
        monkeypatch.setattr(module, "route_for", route_of)
    return made


@pytest.mark.usefixtures("registered")
def test_a_schedule_is_printed():
    """Look at the grid first: who sends what in which step, and [r] computes the block of rank r."""
    _, _, *steps, _, _ = str(schedule(Eager(1, 3), Pass.FORWARD)).splitlines()
    first, last = (line.split(" | ")[1] for line in steps[::2])
    assert first.startswith("data1<2  home>1  data2<1  home>2  wait") and first.strip().endswith("[0]")
    assert last.strip() == "[1]"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("mask", [None, *MASKS], ids=str)
def test_every_program_is_verified(mask):
    """Every pair is computed once, nothing is read before it came or written while it is sent, none waits."""
    for route in (Eager(1, 6), Eager(1, 3, 2), Eager(1, 3, 2, overlap=False)):
        plan = None if mask is None else plan_of(Layout("zigzag"), mask, N, route.placement)
        for pass_ in Pass:
            verify(schedule(route, pass_, plan))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("direction", ["query", "kv"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ranks_in_threads_equal_float64(mask, direction):
    """The real passes over mailboxes: buffers are NaN until a message has arrived."""
    p = problem(0, N, kv_heads=2, head_dim=8)
    got, *_ = simulate(p, mask, "zigzag", Eager(1, 4), direction)
    assert max(error(g, w) for g, w in zip(got, dense(p, mask), strict=True)) <= 1e-12


@on_ranks(4)
def test_processes_equal_float64(rank, size, registered):
    topology, p, mask = Topology.from_group(dist.group.WORLD), problem(1, N, kv_heads=2), MASKS[-1]
    for backward, heads in product(("query", "kv"), (1, 2)):
        config = BurstConfig(ring="direct", backward=backward, head_parallel=heads)
        got = whole_results(p, mask, rank, size, config, topology)
        assert max(error(g, w) for g, w in zip(got, dense(p, mask), strict=True)) <= 1e-12
    assert {route.heads for route in registered} == {1, 2}
