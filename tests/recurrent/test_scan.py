"""The scan's programs: who takes part, how they print, and their bytes against a formula."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burst_mcore import Layout
from burst_mcore.attention.schedule.actions import Send
from burst_mcore.recurrent.fragments import chains
from burst_mcore.recurrent.scan import scan, scan_of


def drawn(seed):
    draw = random.Random(seed)
    size = draw.randint(1, 9)
    intra = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    owners = [[draw.randrange(size) for _ in range(draw.randint(1, 14))] for _ in range(draw.randint(0, 3))]
    return owners, size, intra


@given(st.integers(0, 2**32))
def test_who_has_no_fragment_takes_no_part(seed):
    owners, size, intra = drawn(seed)
    exchange = scan_of(owners, size, intra)
    taking_part = {rank for chain in owners for rank in chain}
    assert all(not program for rank, program in enumerate(exchange.programs) if rank not in taking_part)


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


def test_backward_is_the_scan_of_reversed_chains():
    sharded = Layout("zigzag"), 96, 4, (0, 30, 96)
    owners = [[f.rank for f in reversed(chain)] for chain in chains(*sharded)]
    programs = (scan(*sharded[:3], 2, sharded[3], backward=True), scan_of(owners, 4, 2))
    sends = [
        [(rank, a.peer, a.buffer) for rank, p in enumerate(each.programs) for a in p if isinstance(a, Send)]
        for each in programs
    ]
    assert sends[0] == sends[1] and sends[0]
    assert all(a.channel.kind == "gradient" for p in programs[0].programs for a in p if isinstance(a, Send))
