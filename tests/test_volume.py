"""What choices count on is what the pruned programs send."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import random_layout, random_mask, randoms

from burst_mcore import Layout, Mask
from burst_mcore.attention.actions import DATA, GRADIENT, Send
from burst_mcore.attention.plan import plan
from burst_mcore.attention.rows import count
from burst_mcore.attention.schedule import Route, program
from burst_mcore.attention.volume import read_elsewhere, volume


def _sent(what, route, name):
    sent = {(kind, link): 0 for kind in (DATA, GRADIENT) for link in ("intra", "inter")}
    for rank in range(route.size):
        for action in program(rank, route, name, what):
            if isinstance(action, Send):
                link = "intra" if rank // route.intra == action.peer // route.intra else "inter"
                rows = what.rows if action.rows is None else count(action.rows)
                sent[action.channel.what, link] += rows
    return sent


@settings(max_examples=150, deadline=None)
@given(
    draw=randoms,
    n=st.integers(1, 120),
    route=st.builds(Route, st.integers(1, 4), st.integers(1, 4)),
    mirrored=st.booleans(),
    direct=st.booleans(),
)
def test_volume_is_what_programs_send(draw, n, route, mirrored, direct):
    route = replace(route, direct=True, nodes=1) if direct else replace(route, mirrored=mirrored)
    layout, mask = random_layout(draw, route.size, n), random_mask(draw, n)
    what = plan(layout, mask, n, route.size)
    for name in ("forward", "query", "kv"):
        moved = volume(what, route, name == "query", route.intra)
        sent = _sent(what, route, name)
        assert moved.data == {link: sent[DATA, link] for link in ("intra", "inter")}
        if name != "forward":
            assert moved.gradient == {link: sent[GRADIENT, link] for link in ("intra", "inter")}


@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_mirrored_ring_drops_the_late_half_of_causal_zigzag(size):
    what = plan(Layout("zigzag"), Mask.causal(), 16 * size, size)
    dense = size * (size - 1) * what.rows
    ring, mirrored, direct = (
        volume(what, route, False, size).data["intra"]
        for route in (Route(1, size), Route(1, size, mirrored=True), Route(1, size, direct=True))
    )
    assert mirrored == direct == dense * 3 / 4
    assert mirrored < ring <= dense
    assert read_elsewhere(what, of_queries=False) == 3 / 4


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_moves_halos_whatever_the_length(layout):
    size, window = 8, 32
    moved = []
    for n in (1024, 4096, 16384):
        what = plan(Layout(layout), Mask.window(window, 0), n, size)
        moved.append(volume(what, Route(1, size, direct=True), False, size))
    assert moved[0] == moved[1] == moved[2]
    assert moved[0].data["intra"] == (size - 1 if layout == "contiguous" else 2 * size - 2) * window
    assert moved[0].gradient == moved[0].data
