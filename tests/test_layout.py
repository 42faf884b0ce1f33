import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_mcore import Layout, positions, shard, unshard
from burst_mcore.layout import KINDS

LAYOUTS = st.sampled_from(KINDS)
SIZES = st.integers(1, 9)


@given(LAYOUTS, SIZES, st.integers(1, 5))
def test_every_token_is_on_exactly_one_rank(kind, size, multiple):
    n = Layout(kind).divisor(size) * multiple
    dealt = torch.cat([positions(n, rank=r, size=size, layout=kind) for r in range(size)])
    assert sorted(dealt.tolist()) == list(range(n))


@given(LAYOUTS, SIZES, st.integers(1, 3), st.integers(0, 2))
def test_shard_and_unshard_are_inverse(kind, size, multiple, dim):
    n = Layout(kind).divisor(size) * multiple
    shape = [2, 3, 4]
    shape[dim] = n
    x = torch.randn(shape)
    parts = [shard(x, dim, rank=r, size=size, layout=kind) for r in range(size)]
    assert all(part.shape[dim] == n // size for part in parts)
    assert torch.equal(unshard(parts, dim, layout=kind), x)


@given(LAYOUTS, SIZES, st.integers(1, 3))
def test_positions_are_what_shard_picks(kind, size, multiple):
    n = Layout(kind).divisor(size) * multiple
    for rank in range(size):
        at = positions(n, rank=rank, size=size, layout=kind)
        assert torch.equal(shard(torch.arange(n), 0, rank=rank, size=size, layout=kind), at)


def test_zigzag_is_megatrons():
    chunks = [positions(16, rank=r, size=4, layout="zigzag").tolist() for r in range(4)]
    assert chunks == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_shard_is_differentiable_and_new():
    x = torch.randn(8, requires_grad=True)
    part = shard(x, 0, rank=0, size=2, layout="contiguous")
    part.sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert part.data_ptr() != x.data_ptr()


def test_layout_is_a_value_with_a_shorthand():
    assert Layout.of("zigzag") == Layout("zigzag") == Layout.of(Layout("zigzag")) == Layout()
    assert len({Layout("zigzag"), Layout("zigzag"), Layout("contiguous")}) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout("striped?"), "striped.*zigzag"),
        (lambda: Layout.of(3), "3"),
        (lambda: positions(10, rank=0, size=4, layout="zigzag"), "multiple of 8, got 10.*16"),
        (lambda: positions(0, rank=0, size=4, layout="zigzag"), "positive"),
        (lambda: positions(8, rank=4, size=4, layout="zigzag"), "rank 4 of size 4"),
        (lambda: shard(torch.zeros(2, 9), 1, rank=0, size=2), "got 9"),
        (lambda: unshard([], 0), "one part per rank"),
        (lambda: unshard([torch.zeros(2), torch.zeros(4)], 0), "one shape"),
    ],
)
def test_bad_input_says_what_came_and_what_is_legal(call, words):
    with pytest.raises(ValueError, match=words):
        call()
