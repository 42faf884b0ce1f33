"""Where a sequence is cut: which cuts are legal, what they cost, and which is taken."""

import logging
import random
from functools import lru_cache

import pytest
import torch
from masks import random_layout, random_mask

from burst_mcore import Layout, Mask
from burst_mcore.attention.geometry.cuts import EVEN, cut_for
from burst_mcore.attention.geometry.pattern import Pattern, listed
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.layout.balance import imbalance

CAUSAL = Mask.causal()


@lru_cache
def _seen(mask, n):
    """Keys that each query sees."""
    return mask.allows(torch.arange(n), torch.arange(n)).sum(1)


def _head_work(layout, mask, n, size, at):
    """Pairs of each rank's queries before `at`, by counting."""
    seen = _seen(mask, n)
    return [
        sum(
            int(seen[run.start : min(run.stop, at, n) : run.step].sum()) for run in layout.runs(n, rank, size)
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("keep", [0, 0.25, 0.4, 0.5, 0.75, 0.9, 1])
def test_striped_takes_every_share_and_is_even(size, keep):
    n = 4096
    cut = cut_for(keep, Layout("striped"), CAUSAL, n, size)
    assert abs(cut.keep - keep) < size / n
    assert cut.time == pytest.approx((1 - keep) ** 2, abs=0.002)
    work = _head_work(Layout("striped"), CAUSAL, n, size, cut.position)
    assert max(work) * size <= EVEN * max(sum(work), 1)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("stacks", [2, 4])
@pytest.mark.parametrize("keep", [0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1])
def test_stacked_zigzag_cuts_where_it_is_even(size, stacks, keep):
    n, layout = 4096, Layout("stacked-zigzag", stacks=stacks)
    cut = cut_for(keep, layout, CAUSAL, n, size)
    work = _head_work(layout, CAUSAL, n, size, cut.position)
    assert max(work) * size <= EVEN * sum(work)
    stack = n // stacks  # there it is even for sure
    assert abs(cut.keep - keep) <= min(abs(i * stack / n - keep) for i in range(stacks + 1)) + 1e-9


def test_plain_zigzag_takes_what_pays_and_says_what_is_better(caplog):
    zigzag = Layout("zigzag")
    with caplog.at_level(logging.WARNING, "burst_mcore"):
        quarter = cut_for(0.25, zigzag, CAUSAL, 4096, 8)
    assert quarter.keep == 0  # half the memory for nothing
    assert "striped can be cut anywhere, stacked-zigzag:4" in caplog.text
    assert "keep=0.25 is moved to 0" in caplog.text
    half = cut_for(0.5, zigzag, CAUSAL, 4096, 8)
    assert (half.keep, half.time) == (0.5, pytest.approx(0.469, abs=0.001))
    for tenths in range(11):
        cut = cut_for(tenths / 10, zigzag, CAUSAL, 4096, 8)
        assert cut.pays
        assert 1 - cut.time >= cut.keep - 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_any_mask_and_layout(seed):
    draw = random.Random(seed)
    n, size, keep = draw.randint(1, 200), draw.randint(1, 5), draw.random()
    layout, mask = random_layout(draw, size, n), random_mask(draw, n)
    cut = cut_for(keep, layout, mask, n, size)
    assert 0 <= cut.position <= n
    work, whole = (_head_work(layout, mask, n, size, at) for at in (cut.position, n))
    if not layout.ends:  # of documents it is known to be even
        assert cut.time == pytest.approx(max(work) / max(*whole, 1))
    if layout.kind != "striped":
        assert cut.pays or cut.position in (0, n)
    # The plan of the head has the pairs of queries before the cut, and no other.
    allowed = mask.allows(torch.arange(n), torch.arange(n)).sum(1)[: cut.position].sum()
    of_prefix = plan_of(layout, mask, n, Placement(size)).prefix(cut.position)
    pieces = [listed(of_prefix.pieces(q, k)) for q in range(size) for k in range(size)]
    pairs = sum(Pattern((0, 0), parts=tuple(each)).pairs for each in pieces)
    assert pairs == int(allowed)


@pytest.mark.parametrize("keep", [-0.1, 1.1, float("nan"), "half", True, None])
def test_what_is_no_share_is_refused(keep):
    with pytest.raises(ValueError, match="from 0 to 1"):
        cut_for(keep, Layout("zigzag"), CAUSAL, 64, 2)


def test_documents_sharded_zigzag_are_cut_between_documents():
    ends = tuple(range(0, 1025, 64))
    layout = Layout("zigzag-documents", ends=ends)
    mask = CAUSAL & Mask.documents(ends)
    cut = cut_for(0.52, layout, mask, 1024, 4)
    assert cut.position == 512
    assert imbalance(layout, mask, 1024, 4) == 1.0
