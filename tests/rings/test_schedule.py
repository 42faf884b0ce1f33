import dataclasses
import itertools
import random
from itertools import pairwise

import pytest
import torch

from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.actions import (
    Accumulate,
    Add,
    Channel,
    Compute,
    Kind,
    Link,
    Pack,
    Pass,
    Recv,
    Send,
    Unpack,
    Wait,
    posted_together,
)
from burst_mcore.attention.schedule.route import Route, Schedule, route_for, schedule
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_plan.explain.verify import verify

INTRA_DATA, INTRA_GRADIENT = Channel(Link.INTRA, Kind.DATA), Channel(Link.INTRA, Kind.GRADIENT)
INTER_DATA, INTER_GRADIENT = Channel(Link.INTER, Kind.DATA), Channel(Link.INTER, Kind.GRADIENT)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pass_", Pass)
@pytest.mark.parametrize(
    ("heads", "most"), [(1, 20), (2, 24), (3, 24), (8, 24), pytest.param(1, 32, marks=pytest.mark.slow)]
)
def test_every_ring_and_head_x_ring_of_at_most_so_many_ranks_is_verified(heads, most, pass_, overlap):
    for nodes in range(1, most // heads + 1):
        for intra in range(1, most // heads // nodes + 1):
            verify(schedule(Route(nodes, intra, heads, overlap), pass_))


@pytest.mark.parametrize("pass_", Pass)
def test_data_for_the_next_step_is_under_way_before_compute(pass_):
    for program in schedule(Route(2, 4), pass_).programs:
        for step in range(7):
            actions = [a for a in program if a.step == step]
            compute = next(i for i, a in enumerate(actions) if isinstance(a, Compute))
            posted = {a.channel for a in actions[:compute] if isinstance(a, Recv)}
            # Backward computes each rank's own block first, and the rest of its node last.
            within = step % 4 != 3 if pass_ == Pass.FORWARD else step > 0
            assert posted == ({INTER_DATA} if step == 0 else set()) | ({INTRA_DATA} if within else set())
            before = itertools.takewhile(lambda a: not isinstance(a, Accumulate), actions)
            if pass_ != Pass.FORWARD:  # kernels that add in place run at Accumulate, beside the message
                assert INTRA_DATA not in {a.channel for a in before if isinstance(a, Wait)}


@pytest.mark.parametrize(("nodes", "intra"), [(2, 2), (2, 4), (3, 3), (4, 2), (5, 4)])
def test_backward_hides_every_message_between_nodes_one_at_a_time(nodes, intra):
    for program in schedule(Route(nodes, intra), Pass.QUERY).programs:
        computes, steps = dict[object, int](), 0
        for action in program:
            match action:
                case Recv(channel=channel) if channel.link == Link.INTER:
                    computes[channel] = 0
                case Compute():
                    assert len(computes) <= 1, action
                    computes = {channel: n + 1 for channel, n in computes.items()}
                case Wait(channel=channel) if channel in computes:
                    steps += computes.pop(channel) > 0
        assert steps == 2 * (nodes - 1)


@pytest.mark.parametrize("pass_", Pass)
def test_without_overlap_nothing_is_under_way_during_compute(pass_):
    for program in schedule(Route(2, 3, 2, overlap=False), pass_).programs:
        under_way = set()
        for action in program:
            if isinstance(action, (Send, Recv)):
                under_way.add(action.channel)
            elif isinstance(action, Wait):
                under_way.remove(action.channel)
            else:
                assert not under_way or isinstance(action, (Pack, Unpack)), action


def test_the_head_group_overlaps_with_the_first_and_the_last_step():
    for program in schedule(Route(2, 1, 4), Pass.FORWARD).programs:
        computes = [i for i, a in enumerate(program) if isinstance(a, Compute)]
        assert [program[i].part is None for i in computes] == [False] * 8
        waits = [
            sum(isinstance(a, Wait) and a.channel.kind == Kind.STAYING_IN for a in program[before:after])
            for before, after in pairwise(computes[:4])
        ]
        assert waits == [1, 0, 1]  # rows come between the parts: of both neighbours, then of the last member
        sends = [
            sum(isinstance(a, Send) and a.channel.kind == Kind.STAYING_OUT for a in program[before:after])
            for before, after in pairwise(computes[4:])
        ]
        assert sends == [0, 2, 1]  # results leave between the parts, to the same members together


def _broken(edit, route=Route(1, 3), pass_=Pass.QUERY):  # noqa: B008
    right = schedule(route, pass_)
    return Schedule("broken", route, tuple(tuple(edit(r, list(p))) for r, p in enumerate(right.programs)))


def _without(action_type, **fields):
    def edit(rank, program):
        for index, action in enumerate(program):
            if isinstance(action, action_type) and all(getattr(action, k) == v for k, v in fields.items()):
                return program[:index] + program[index + 1 :]
        return program

    return edit


def _changed(action_type, change, on_rank=None, **fields):
    def edit(rank, program):
        for index, action in enumerate(program):
            matches = isinstance(action, action_type) and all(
                getattr(action, k) == v for k, v in fields.items()
            )
            if matches and on_rank in (None, rank):
                return [*program[:index], dataclasses.replace(action, **change), *program[index + 1 :]]
        return program

    return edit


def _accumulated_into_what_is_sent(rank, program):
    at = next(i for i, a in enumerate(program) if isinstance(a, Send) and a.channel == INTRA_GRADIENT)
    return [*program[: at + 1], Accumulate(0, rank, program[at].buffer, first=True), *program[at + 1 :]]


RING, DOUBLE, HEADS = Route(1, 3), Route(2, 2), Route(1, 2, 2)


@pytest.mark.parametrize(
    ("route", "edit", "words"),
    [
        (RING, _without(Compute, step=1), "computed sources|gradient of"),
        (RING, _changed(Compute, {"source": 0}, step=1), "does not hold|computed"),
        (
            RING,
            _without(Wait, step=0, channel=INTRA_DATA),
            "step 1: .* message arrives in it: no wait for intra data",
        ),
        (RING, _without(Wait, step=3, channel=Channel(Link.INTRA, Kind.TOTAL)), "nobody waited"),
        (RING, _changed(Recv, {"buffer": "home"}, step=0), "caller's"),
        (RING, _accumulated_into_what_is_sent, "step 0: sum.* while it is sent: no wait for intra gradient"),
        (RING, _changed(Accumulate, {"buffer": "sum1"}, step=0), "before anything arrived|gradient of"),
        (RING, _without(Send, step=0, channel=INTRA_DATA), "deadlock"),
        (RING, _without(Accumulate, step=2), "gradient|before anything arrived"),
        (RING, _changed(Send, {"peer": 0}, on_rank=0, step=0, channel=INTRA_DATA), "deadlock"),
        (DOUBLE, _without(Add, step=3), "at home is"),
        (DOUBLE, _changed(Add, {"addend": "sum0"}), "added to that of|before anything arrived|touched"),
        (DOUBLE, _without(Wait, channel=INTER_DATA), "while a message arrives|nobody waited"),
        (DOUBLE, _changed(Recv, {"buffer": "data0"}, step=1, channel=INTRA_DATA), "while a message arrives"),
        (HEADS, _without(Unpack, kind=Kind.STAYING_IN), "before they came"),
        (HEADS, _without(Unpack, kind=Kind.ROTATING_IN), "before all of the head group"),
        (HEADS, _without(Unpack, kind=Kind.STAYING_OUT), "of the head group|its results stay"),
        (HEADS, _without(Compute, step=0), "leave before they are complete|must be each of"),
        (HEADS, _changed(Unpack, {"member": 0}, kind=Kind.STAYING_OUT), "before anything arrived"),
    ],
)
def test_verify_finds_what_is_wrong(route, edit, words):
    with pytest.raises(ValueError, match=words):
        verify(_broken(edit, route, Pass.FORWARD if route == HEADS else Pass.QUERY))


def _sends_before_receives(rank, program):
    """Every step as two batches, the sends' first: gloo does not mind."""
    edited = []
    for channel, actions in posted_together(tuple(program)):
        sends = [a for a in actions if isinstance(a, Send)]
        if channel is None or not 0 < len(sends) < len(actions):
            edited += actions
            continue
        between = Add(actions[0].step, "spare", "spare", first=True)
        edited += [*sends, between, *(a for a in actions if isinstance(a, Recv))]
    return edited


def test_verify_knows_that_nccl_runs_batches_in_the_order_of_posting(monkeypatch):
    monkeypatch.setattr("burst_plan.explain.verify._add", lambda rank, action: None)
    with pytest.raises(ValueError, match="deadlock: rank 0, step 0: wait intra data .at the head of"):
        verify(_broken(_sends_before_receives, pass_=Pass.FORWARD))


def _another_kind(rank, program):
    """Rank 1 posts the first messages of its head group as messages of another kind."""
    first = next(a.channel for a in program if isinstance(a, Send) and a.channel.link == Link.HEADS)
    kind = Kind.STAYING_OUT if first.kind != Kind.STAYING_OUT else Kind.STAYING_IN
    return [
        dataclasses.replace(a, channel=a.channel._replace(kind=kind, distance=99))
        if rank == 1 and getattr(a, "channel", None) == first
        else a
        for a in program
    ]


def test_verify_knows_that_nccl_matches_messages_by_their_order_alone():
    with pytest.raises(ValueError, match="expects heads .*, gets heads .*share a communicator"):
        verify(_broken(_another_kind, Route(1, 2, 2), Pass.FORWARD))


def _routes(size, intra):
    placed = (h for h in (1, 2, 3, 4, 8) if size % h == 0 and (intra % h == 0 or h % intra == 0))
    for heads in placed:
        positions = size // heads
        for overlap in (True, False):
            yield Route(1, positions, heads, overlap)
            if positions > 1:
                yield Route(1, positions, heads, overlap, mirrored=True)
                yield Route(1, positions, heads, overlap, direct=True)
            if 1 < heads < size:
                yield route_for(heads, Ranks(size, intra), ring="double", overlap=overlap, outer=True)
            if size > intra and intra % heads == 0:
                yield Route(size // intra, intra // heads, heads, overlap)
                yield Route(size // intra, intra // heads, heads, overlap, mirrored=True)


def _masks(draw, n):
    yield from (None, Mask.causal(), Mask.window(n // 20, 0), Mask.window(n // 4, 0))
    yield Mask.causal() & Mask.documents([0, 10, 11, 60, n // 2, n])
    for share in (0.15, 0.35, 0.55):
        yield Mask.blocks(torch.tensor([[draw.random() < share for _ in range(n // 32)]] * (n // 32)), 32)


SIZES = [(2, 2), (3, 3), (4, 2), (4, 4), (6, 3), (8, 2), (8, 4), (8, 8)]


@pytest.mark.parametrize(
    ("size", "intra"), [(4, 2), *(pytest.param(*s, marks=pytest.mark.slow) for s in SIZES)]
)
def test_all_schedules_pass_under_nccls_rule(size, intra):
    """Of all sizes, routes, layouts, masks and passes: 10,000 and more."""
    draw, n, count = random.Random(0), 64 * size, 0
    for route, layout in itertools.product(_routes(size, intra), ("zigzag", "striped", "contiguous")):
        for mask in _masks(draw, n):
            plan = mask if mask is None else plan_of(Layout.of(layout), mask, n, route.placement)
            for pass_ in Pass:
                verify(schedule(route, pass_, plan), intra)
                count += 1
    assert count > 100
