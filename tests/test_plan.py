import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_mcore import Layout, Mask, positions
from burst_mcore.attention.plan import pooled_rows, tiles
from burst_mcore.layout import KINDS

MASKS = (Mask.causal(), Mask.full())


@given(st.sampled_from(KINDS), st.sampled_from(MASKS), st.integers(1, 8), st.integers(1, 3))
def test_tiles_cover_every_allowed_pair_exactly_once(kind, mask, size, multiple):
    layout = Layout(kind)
    n = layout.divisor(size) * multiple
    met = torch.zeros(n, n, dtype=torch.int)
    for q_rank, k_rank in itertools.product(range(size), repeat=2):
        at_q = positions(n, rank=q_rank, size=size, layout=layout)
        at_k = positions(n, rank=k_rank, size=size, layout=layout)
        for tile in tiles(layout, mask, n, q_rank, k_rank, size):
            pairs = torch.ones(len(tile.q), len(tile.k), dtype=torch.int)
            pairs = pairs.tril() if tile.causal else pairs
            assert tile.pairs == pairs.sum()
            met[at_q[tile.q.start : tile.q.stop, None], at_k[None, tile.k.start : tile.k.stop]] += pairs
    assert torch.equal(met, mask.allows(torch.arange(n), torch.arange(n)).int())


@pytest.mark.parametrize("size", range(1, 9))
def test_causal_zigzag_needs_one_tile_a_pair_and_is_balanced(size):
    layout, n = Layout("zigzag"), 16 * size
    work = []
    for q_rank in range(size):
        plans = [tiles(layout, Mask.causal(), n, q_rank, k_rank, size) for k_rank in range(size)]
        assert all(len(plan) == 1 for plan in plans)
        work.append(sum(plan[0].pairs for plan in plans))
    assert len(set(work)) == 1


def test_causal_zigzag_tiles_are_those_of_the_design():
    def tile(q_rank, k_rank):
        (one,) = tiles(Layout("zigzag"), Mask.causal(), 32, q_rank, k_rank, 4)
        return (one.q.start, one.q.stop), (one.k.start, one.k.stop), one.causal

    assert tile(1, 1) == ((0, 8), (0, 8), True)
    assert tile(2, 1) == ((0, 8), (0, 4), False)  # all queries x front keys
    assert tile(1, 2) == ((4, 8), (0, 8), False)  # back queries x all keys


def test_causal_contiguous_skips_later_ranks():
    assert tiles(Layout("contiguous"), Mask.causal(), 32, 0, 1, 4) == ()


class Striped(Layout):
    """Rank r holds tokens r, r + G, ...: the tokens of neighbours are not those of one rank."""

    def runs(self, n, rank, size):
        return (range(rank, n, size),)


def test_a_layout_that_does_not_pool_is_refused_by_name():
    with pytest.raises(ValueError, match=r"head_parallel=2 does not go with layout zigzag"):
        pooled_rows(Striped(), 64, 0, 2, 2, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "heads"), [(1, 4), (2, 2), (3, 2), (2, 4)])
def test_the_rows_of_a_head_group_are_its_positions(kind, size, heads):
    layout, n = Layout(kind), 4 * Layout(kind).divisor(size * heads)
    for position in range(size):
        pooled = positions(n, rank=position, size=size, layout=layout)
        for member in range(heads):
            own = positions(n, rank=position * heads + member, size=size * heads, layout=layout)
            rows = [r for run in pooled_rows(layout, n, position, size, heads, member) for r in run]
            assert pooled[rows].tolist() == own.tolist()
