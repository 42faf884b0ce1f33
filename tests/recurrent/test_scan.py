"""The scan's programs: verified for any owners, their bytes against a formula, and mutants that fail."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verified import verify_scan

from burst_mcore import Layout
from burst_mcore.attention.schedule.actions import Recv, Send
from burst_mcore.recurrent.fragments import chains
from burst_mcore.recurrent.programs import Compose, Span
from burst_mcore.recurrent.scan import scan, scan_of

STATE = 32 * 128 * 128 * 4
"""Bytes of a state of Qwen3.5's gated delta rule: 32 heads of 128 x 128 in float32; A has as many."""


def drawn(seed):
    draw = random.Random(seed)
    size = draw.randint(1, 9)
    intra = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    owners = [[draw.randrange(size) for _ in range(draw.randint(1, 14))] for _ in range(draw.randint(0, 3))]
    return owners, size, intra


@given(st.integers(0, 2**32))
def test_every_fragment_gets_the_state_before_it(seed):
    owners, size, intra = drawn(seed)
    exchange = scan_of(owners, size, intra)
    verify_scan(exchange, owners)
    taking_part = {rank for chain in owners for rank in chain}
    assert all(not program for rank, program in enumerate(exchange.programs) if rank not in taking_part)


@given(st.integers(0, 2**32))
def test_a_program_without_one_of_its_messages_fails(seed):
    owners, size, intra = drawn(seed)
    exchange = scan_of(owners, size, intra)
    places = [
        (rank, place)
        for rank, program in enumerate(exchange.programs)
        for place, action in enumerate(program)
        if isinstance(action, (Send, Recv))
    ]
    if not places:
        return
    rank, place = random.Random(seed).choice(places)
    programs = list(exchange.programs)
    programs[rank] = programs[rank][:place] + programs[rank][place + 1 :]
    with pytest.raises(ValueError, match="rank|step"):
        verify_scan(replace(exchange, programs=tuple(programs)), owners)


def test_maps_composed_in_the_wrong_order_fail():
    owners = [[0, 1, 2, 3]]
    exchange = scan_of(owners, 4, 4)

    def turned(action):
        if isinstance(action, Compose):
            return replace(action, earlier=action.later, later=action.earlier)
        return action

    programs = tuple(tuple(map(turned, program)) for program in exchange.programs)
    with pytest.raises(ValueError, match="does not follow"):
        verify_scan(replace(exchange, programs=programs), owners)


def test_a_program_is_as_it_was_read():
    title, *lines = str(scan_of([[0, 1, 2]], 3, 3)).splitlines()
    assert title == "scan: the state before each fragment; 1 x 3 ranks"
    wait = "wait direct data"
    assert [[cell.strip() for cell in line.split("|")] for line in lines] == [
        ["step", "rank 0", "rank 1", "rank 2"],
        ["0", f"0[0:1]>1  {wait}", f"0[0:1]<0  0[1:2]>2  {wait}", f"0[1:2]<1  {wait}"],
        ["1", f"0[0:1]>2  {wait}", "", f"0[0:1]<0  {wait}  0[0:2]=0[1:2]*0[0:1]"],
    ]


@pytest.mark.parametrize("size", [2, 3, 8, 13, 32])
def test_bytes_on_one_node_are_those_of_the_formula(size):
    """Fragment i takes ceil(log2(i + 1)) messages: all maps but the last, which is a state."""
    exchange = scan(Layout("contiguous"), 64 * size, size, size)
    for rank in range(size):
        many = math.ceil(math.log2(rank + 1))
        want = 0 if many == 0 else (many - 1) * (5 + 3) + 3
        assert exchange.received(rank, state=3, decay=5) == want


@pytest.mark.parametrize(("size", "steps", "busiest"), [(8, 3, 10.5), (32, 9, 18.9), (64, 10, 23.1)])
def test_bytes_grow_with_the_logarithm_of_the_ranks(size, steps, busiest):
    exchange = scan(Layout("contiguous"), 1024 * size, size, 8)
    received = [exchange.received(rank, state=STATE, decay=STATE) for rank in range(size)]
    assert max(received) / 1e6 == pytest.approx(busiest, abs=0.05)
    assert max(action.step for program in exchange.programs for action in program) + 1 == steps
    gathered = 2 * STATE * (size - 1)
    assert max(received) < gathered / (2.5 if size == 8 else 6)


def test_between_nodes_only_ends_of_segments_send():
    exchange = scan(Layout("contiguous"), 1024, 8, 4)
    crossing = [
        (rank, action.peer)
        for rank, program in enumerate(exchange.programs)
        for action in program
        if isinstance(action, Send) and rank // 4 != action.peer // 4
    ]
    assert crossing == [(3, 7)]


def test_backward_is_the_scan_of_reversed_chains():
    sharded = Layout("zigzag"), 96, 4, (0, 30, 96)
    owners = [[f.rank for f in reversed(chain)] for chain in chains(*sharded)]
    exchange = scan(*sharded[:3], 2, sharded[3], backward=True)
    verify_scan(exchange, owners)
    assert all(a.channel.kind == "gradient" for p in exchange.programs for a in p if isinstance(a, Send))


def test_names_of_spans_are_read_back():
    assert Span.of(str(Span(3, 14, 159))) == Span(3, 14, 159)
