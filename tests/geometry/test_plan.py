"""Masks x layouts -> pieces -> tiles, against the definition of the mask, pair by pair."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from masks import brute, random_layout, random_mask, randoms

from burst_mcore import Layout, Mask, positions
from burst_mcore.attention.geometry import tiles as tiles_module
from burst_mcore.attention.geometry.pattern import Abilities, Pattern, listed
from burst_mcore.attention.geometry.plan import Plan, plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import tiles, tiles_of


def _rows(plan, position):
    """Global position of each local row of a position."""
    at = torch.empty(plan.rows, dtype=torch.int64)
    for stretch in plan.stretches(position):
        rows = torch.arange(stretch.rows.start, stretch.rows.stop)
        at[rows] = stretch.positions(rows)
    return at


def _index(rows):
    return torch.tensor([row for each in rows for row in each], dtype=torch.int64)


@settings(max_examples=250, deadline=None)
@given(
    draw=randoms,
    n=st.integers(1, 60) | st.integers(1, 3).map(lambda i: 24 * i),
    size=st.integers(1, 4),
    heads=st.sampled_from([1, 1, 2, 3]),
    windows=st.booleans(),
    masks=st.booleans(),
    whole=st.booleans(),
    packed=st.booleans(),
    keys_stay=st.booleans(),
    sizes=st.sampled_from([None, None, None, {"CALL": 1, "DIAGONAL": 6, "GATHERED": 4, "PACKED": 40}]),
)
def test_tiles_hold_every_allowed_pair_once_and_no_other(
    draw, n, size, heads, windows, masks, whole, packed, keys_stay, sizes
):
    """Also with sizes so small that short sequences are cut into strips, gathered and packed in part."""
    layout, mask = random_layout(draw, size * heads, n), random_mask(draw, n)
    if sizes and draw.random() < 0.5:  # narrow bands, which are cut
        left = draw.randint(0, 4)
        mask = Mask.window(left, draw.randint(0, 4 - left))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (sizes or {}).items():
            patch.setattr(tiles_module, name, value)
        plan = Plan(layout, mask, n, Placement(size, heads))
        _hold_every_pair_once(draw, plan, mask, windows or packed, masks, whole, packed, keys_stay)


def _hold_every_pair_once(draw, plan, mask, windows, masks, whole, packed, keys_stay):
    layout, n, size, heads = plan.layout, plan.n, plan.size, plan.heads
    abilities, part = Abilities(windows, masks, whole, packed), draw.choice([None, *range(heads)])
    met = torch.zeros(layout.padded(n, size * heads), layout.padded(n, size * heads), dtype=torch.int)
    at = [_rows(plan, position) for position in range(size)]
    for q_at, k_at in itertools.product(range(size), repeat=2):
        parts = {"k_part" if keys_stay else "q_part": part, "keys_stay": keys_stay}
        kernel_calls = tiles_of(plan, q_at, k_at, abilities, **parts)
        pieces = listed(plan.pieces(q_at, k_at, **parts))
        assert sum(tile.pattern.pairs for tile in kernel_calls) == Pattern((0, 0), parts=tuple(pieces)).pairs
        for tile in kernel_calls:
            assert masks or whole or not tile.pattern.masked or (packed and tile.pattern.packed)
            assert len(kernel_calls) == 1 or not whole
            assert (
                windows
                or tile.pattern.masked
                or (tile.pattern.low is None and tile.pattern.high in (None, 0))
            )
            assert windows or not tile.pattern.causal or tile.pattern.shape[0] == tile.pattern.shape[1]
            q, k = _index(tile.q), _index(tile.k)
            assert set(q.tolist()) <= set(_index(plan.needed(q_at, k_at, of_queries=True)).tolist())
            assert set(k.tolist()) <= set(_index(plan.needed(k_at, q_at, of_queries=False)).tolist())
            assert tile.pattern.pairs == tile.pattern.table.sum()
            met[at[q_at][q][:, None], at[k_at][k][None, :]] += tile.pattern.table.int()
    want = brute(mask, n).int()
    if part is not None:
        own = [
            positions(n, rank=position * heads + part, size=size * heads, layout=layout)
            for position in range(size)
        ]
        others = torch.ones(n, dtype=torch.bool)
        others[torch.cat(own)] = False
        (want.T if keys_stay else want)[others] = 0
    assert torch.equal(met[:n, :n], want)
    assert met.sum() == want.sum()  # nothing is in the padding


@settings(max_examples=60, deadline=None)
@given(draw=randoms, size=st.integers(1, 4), heads=st.sampled_from([1, 1, 2]), stride=st.integers(2, 7))
@example(draw=random.Random(296), size=3, heads=1, stride=5)  # a key that no query of its rectangle sees
def test_rows_of_classes_lie_where_all_rows_rotate(draw, size, heads, stride):
    """A tile's rows have gaps there, but between the first and the last of a range all rows are sent."""
    n = 24 * draw.randint(3, 8)
    ends = Mask.documents([0, *sorted(draw.sample(range(1, n), 3)), n])
    mask = Mask.dilated(draw.randint(1, n), stride) & (ends if draw.random() < 0.5 else Mask.causal())
    layout = Layout.of(draw.choice((f"block-striped:{size * heads}", "stacked-zigzag:9")))
    plan = plan_of(layout, mask, n, Placement(size, heads))
    assert plan.by_class == (size * heads > 1)
    for q_at, k_at in itertools.product(range(size), repeat=2):
        for tile in tiles_of(plan, q_at, k_at, Abilities(masks=True)):
            for rows, rotate in (
                (tile.q, plan.needed(q_at, k_at, of_queries=True)),
                (tile.k, plan.needed(k_at, q_at, of_queries=False)),
            ):
                assert all(any(min(x) in own and max(x) in own for own in rotate) for x in rows)


def test_causal_zigzag_pieces_are_those_of_the_design():
    plan = plan_of(Layout("zigzag"), Mask.causal(), 32, Placement(4))

    def tile(q_at, k_at):
        (one,) = tiles_of(plan, q_at, k_at, Abilities(masks=True))
        return one.q, one.k, one.pattern.causal

    assert tile(1, 1) == ((range(8),), (range(8),), True)
    assert tile(2, 1) == ((range(8),), (range(4),), False)  # all queries x front keys
    assert tile(1, 2) == ((range(4, 8),), (range(8),), False)  # back queries x all keys


def test_small_pieces_share_a_call_and_large_ones_do_not():
    short = plan_of(
        Layout("contiguous"), Mask.documents(range(0, 1025, 8)) & Mask.causal(), 1024, Placement(1)
    )
    alone = tiles(short.pieces(0, 0), Abilities())
    together = tiles(short.pieces(0, 0), Abilities(masks=True))
    assert len(alone) == 128
    assert len(together) < 20
    assert sum(math.prod(tile.pattern.shape) for tile in together) < 1024 * 1024 / 5  # nowhere near dense
    long = plan_of(Layout("contiguous"), Mask.documents([0, 2048, 4096]) & Mask.causal(), 4096, Placement(1))
    assert [tile.pattern.causal for tile in tiles(long.pieces(0, 0), Abilities(masks=True))] == [True, True]
