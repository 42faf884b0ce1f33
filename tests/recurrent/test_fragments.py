"""Fragments and the halos between them: every token is in one, and every row that is read is named."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from masks import random_layout

from burst_mcore import Layout
from burst_mcore.layout import positions
from burst_mcore.recurrent.fragments import chains, fragments


def sharded(draw):
    """(layout, tokens, size, ends) of a layout that has fragments."""
    while True:
        size, tokens = draw.randint(1, 6), draw.randint(1, 80)
        layout = random_layout(draw, size, tokens)
        ends = (0, *sorted(draw.randint(0, tokens) for _ in range(draw.randint(0, 6))), tokens)
        if layout.kind != "striped":
            return layout, tokens, size, ends


cases = st.integers(0, 2**32).map(lambda seed: sharded(random.Random(seed)))


@given(cases)
def test_fragments_hold_each_token_once_and_lie_within_documents(case):
    layout, tokens, size, ends = case
    found = fragments(*case)
    assert [t for f in found for t in range(f.start, f.stop)] == list(range(tokens))
    starts = set(ends[:-1])
    for rank in range(size):
        own = [f for f in found if f.rank == rank]
        held = positions(tokens, rank=rank, size=size, layout=layout).tolist()
        assert [t for f in own for t in range(f.start, f.stop)] == held
        assert [row for f in own for row in f.rows] == list(range(len(held)))
    for fragment in found:
        assert fragment.begins == (fragment.start in starts) and fragment.ends == (fragment.stop in ends)
        assert not starts.intersection(range(fragment.start + 1, fragment.stop))
    for chain in chains(*case):
        assert [a.stop for a in chain[:-1]] == [b.start for b in chain[1:]]
        assert [f.begins for f in chain] == [True] + [False] * (len(chain) - 1)
        assert [f.ends for f in chain] == [False] * (len(chain) - 1) + [True]


def test_zigzag_has_two_fragments_a_rank_and_a_document_cuts_them():
    assert " ".join(map(str, fragments(Layout("zigzag"), 32, 4, (0, 5, 32)))) == (
        "[0:4)@0 (4:5]@1 [5:8)@1 (8:12)@2 (12:20)@3 (20:24)@2 (24:28)@1 (28:32]@0"
    )


def test_a_layout_of_single_tokens_and_documents_that_do_not_fit_are_refused():
    for size in (3, 4):
        with pytest.raises(
            ValueError, match="striped shards neighbouring tokens to different ranks"
        ) as refused:
            fragments(Layout("striped"), 12 * size, size)
        advised = Layout.of(str(refused.value).rsplit(" ", 1)[1])
        assert len(fragments(advised, 1536 * size, size)) == 12 * size
    for ends in ((0, 8), (4, 32), (0, 20, 10, 32)):
        with pytest.raises(ValueError, match="from 0 to the 32 tokens"):
            fragments(Layout("zigzag"), 32, 4, ends)
