import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import burst_mcore
from burst_mcore import Mask, Topology, burst_attention
from burst_mcore.attention.numerics.merge import GradientSum, OnlineSoftmax


def test_gradients_are_summed_in_float32():
    total = GradientSum(torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16))
    total.add((range(4),), (torch.full((1, 4, 1, 1), 256.0, dtype=torch.bfloat16),))
    for _ in range(4):  # bfloat16 has 8 bits: 256 + 0.5 would stay 256
        total.add((range(2),), (torch.full((1, 2, 1, 1), 0.5, dtype=torch.bfloat16),))
    assert total.result().flatten().tolist() == [258, 258, 256, 256]
    assert GradientSum(torch.ones(1, 2, 1, 1)).result().tolist() == torch.zeros(1, 2, 1, 1).tolist()


ROWS = 24


@st.composite
def _some_rows(draw):
    """One to three ranges of rows that have none in common, ascending or descending, with any step."""
    free, found = set(range(ROWS)), []
    for _ in range(draw(st.integers(1, 3))):
        first, step = draw(st.integers(0, ROWS - 1)), draw(st.integers(1, 7))
        rows = range(first, draw(st.integers(first + 1, ROWS)), step)
        if free.issuperset(rows):
            free.difference_update(rows)
            found.append(rows[::-1] if draw(st.booleans()) else rows)
    return tuple(found)


@given(st.lists(_some_rows(), max_size=6), st.integers(0, 1000))
def test_any_rows_in_any_order_are_summed_and_merged(tiles, seed):
    """What no tile touched is NaN in memory (conftest), and must never be seen."""
    generator = torch.Generator().manual_seed(seed)
    like = torch.zeros(1, ROWS, 2, 3)
    total, softmax = GradientSum(like), OnlineSoftmax(like, value_dim=3)
    sums, scores, values = torch.zeros(1, ROWS, 2, 3), [], []
    for tile in tiles:
        order = [row for rows in tile for row in rows]
        gradient, out = torch.randn(2, 1, len(order), 2, 3, generator=generator)
        lse = torch.randn(1, 2, len(order), generator=generator)
        sums[:, order] += gradient
        scores.append(torch.full((1, 2, ROWS), -torch.inf))
        scores[-1][:, :, order] = lse
        values.append(torch.zeros_like(like))
        values[-1][:, order] = out
        total.add(tile, (gradient,))
        softmax.add(tile, (out, lse))
    torch.testing.assert_close(total.result(), sums)
    got, got_lse = softmax.result()
    if not tiles:
        assert not got.any()
        return
    want_lse = torch.stack(scores).logsumexp(0)
    weights = torch.exp(torch.stack(scores) - want_lse.masked_fill(want_lse == -torch.inf, 0.0))
    torch.testing.assert_close(got_lse, want_lse)
    torch.testing.assert_close(got, (weights.transpose(2, 3)[..., None] * torch.stack(values)).sum(0))


@pytest.mark.parametrize(
    "masks", [(Mask.causal(), Mask.window(0, 3)), (Mask.ranges([(2, 9)], [(0, 4)]),) * 2]
)
def test_attention_over_two_sets_of_keys_is_that_over_both(masks):
    n, generator = 12, torch.Generator().manual_seed(0)
    q, k, v, draft_k, draft_v = (
        torch.randn(1, n, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(5)
    )
    single, at = Topology.single(), torch.arange(n)
    parts = [
        burst_attention(q, *keys, topology=single, mask=mask, return_lse=True)
        for keys, mask in zip(((k, v), (draft_k, draft_v)), masks, strict=True)
    ]
    out, lse = burst_mcore.merge(*parts[0], *parts[1])
    scores = torch.einsum("bmhd,bnhd->bhmn", q, torch.cat([k, draft_k], 1)) / 8**0.5
    hidden = ~torch.cat([mask.allows(at, at) for mask in masks], 1)
    want_lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    blind = hidden.all(1)
    weights = torch.exp(scores - want_lse.masked_fill(blind, 0)[..., None]).masked_fill(hidden, 0)
    want = torch.einsum("bhmn,bnhd->bmhd", weights, torch.cat([v, draft_v], 1))
    torch.testing.assert_close(lse, want_lse.transpose(1, 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    upstream_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)[:, ~blind]
    inputs = q, k, v, draft_k, draft_v
    found = torch.autograd.grad([out, lse[:, ~blind]], inputs, [upstream, upstream_lse])
    seen = want_lse.transpose(1, 2)[:, ~blind]
    for one, other in zip(
        found, torch.autograd.grad([want, seen], inputs, [upstream, upstream_lse]), strict=True
    ):
        torch.testing.assert_close(one, other.nan_to_num(), rtol=1e-10, atol=1e-10)


def test_sets_that_do_not_go_together_are_refused():
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(
        ValueError, match=r"each with its lse \[batch, local sequence, heads\], got .*\(1, 2, 4\)"
    ):
        burst_mcore.merge(out, lse, out, lse)
