"""Who reads what of whom, and what steps carry, against the pieces of the plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import brute, random_layout, random_mask, randoms

from burst_mcore import Layout, Mask, positions
from burst_mcore.attention.geometry import reading as readings
from burst_mcore.attention.geometry.pattern import listed
from burst_mcore.attention.geometry.plan import Plan, plan_of
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.geometry.rows import count, union
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.schedule.actions import Pass, Send
from burst_mcore.attention.schedule.route import Route, program, schedule
from burst_mcore.mask.terms import Stride
from burst_plan.explain.verify import verify

PLACES = {"size": st.integers(1, 4), "heads": st.sampled_from([1, 1, 2, 3]), "n": st.integers(1, 90)}


@settings(max_examples=200, deadline=None)
@given(draw=randoms, **PLACES)
def test_what_is_read_are_the_rows_of_the_pieces(draw, size, heads, n):
    layout, mask = random_layout(draw, size * heads, n), random_mask(draw, n)
    plan = plan_of(layout, mask, n, Placement(size, heads))
    if plan.by_class:  # its pieces count other rows; those are read that would be without the stride
        mask = Mask(tuple(term for term in mask.terms if not isinstance(term, Stride)))
    counted = plan_of(layout, mask, n, Placement(size, heads))
    for of_queries in (False, True):
        reading = plan.reading(of_queries=of_queries)
        for at in range(size):
            for by in range(size):
                pieces = counted.pieces(at, by) if of_queries else counted.pieces(by, at)
                rows = [range(p.m0, p.m1) if of_queries else range(p.n0, p.n1) for p in listed(pieces)]
                needed = reading.needed(at, by)
                if not plan.everything:
                    assert needed == union(rows)
                assert bool(reading.meets[at, by]) == bool(needed)


@settings(max_examples=200, deadline=None)
@given(draw=randoms, size=st.integers(1, 6), n=st.integers(1, 90))
def test_pairs_between_ranks_are_counted(draw, size, n):
    layout, mask = random_layout(draw, size, n), random_mask(draw, n)
    found, want = pairs_between(layout, mask, n, size), brute(mask, n)
    held = [positions(n, rank=rank, size=size, layout=layout) for rank in range(size)]
    for q in range(size):
        for k in range(size):
            assert found[q, k] == want[held[q]][:, held[k]].sum()


@settings(max_examples=100, deadline=None)
@given(
    draw=randoms,
    n=st.integers(1, 120),
    route=st.builds(Route, st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 1, 2])),
    mirrored=st.booleans(),
    direct=st.booleans(),
)
def test_programs_carry_what_is_read_and_are_verified(draw, n, route, mirrored, direct):
    route = replace(route, direct=True, nodes=1) if direct else replace(route, mirrored=mirrored)
    layout, mask = random_layout(draw, route.size, n), random_mask(draw, n)
    plan = plan_of(layout, mask, n, route.placement)
    for pass_ in Pass:
        verify(schedule(route, pass_, plan))


@pytest.mark.parametrize("limit", ["MOST", "STRIPES"])
@settings(max_examples=60, deadline=None)
@given(draw=randoms, n=st.integers(8, 120), size=st.integers(2, 4))
def test_where_finding_out_costs_too_much_more_is_read_never_less(limit, draw, n, size):
    layout, mask = random_layout(draw, size, n), random_mask(draw, n)
    exact = Plan(layout, mask, n, Placement(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, limit, 8 * size)
        coarse = Plan(layout, mask, n, Placement(size))
        for of_queries in (False, True):
            coarse.reading(of_queries=of_queries)
    for of_queries in (False, True):
        for at in range(size):
            for by in range(size):
                more, less = (each.needed(at, by, of_queries=of_queries) for each in (coarse, exact))
                assert union([*more, *less]) == more
    for pass_ in Pass:
        verify(schedule(Route(1, size), pass_, coarse))


def _rows_sent(plan, route, pass_="forward"):
    programs = [program(rank, route, pass_, plan) for rank in range(route.size)]
    sends = [action for steps in programs for action in steps if isinstance(action, Send)]
    return sum(plan.rows if action.rows is None else count(action.rows) for action in sends)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_moves_halos_whatever_the_length(layout):
    size, window = 8, 32
    moved = []
    for n in (1024, 4096, 16384):
        plan = plan_of(Layout(layout), Mask.window(window, 0), n, Placement(size))
        moved.append(_rows_sent(plan, Route(1, size, direct=True)))
    assert set(moved) == {(size - 1 if layout == "contiguous" else 2 * size - 2) * window}
