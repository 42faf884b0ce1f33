import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masks import random_layout, randoms

from burst_mcore import Layout, positions, shard, unshard

SIZES = st.integers(1, 9)


@given(randoms, SIZES, st.integers(1, 100))
def test_every_token_is_on_exactly_one_rank(draw, size, n):
    layout = random_layout(draw, size, n)
    sharded = [positions(n, rank=r, size=size, layout=layout).tolist() for r in range(size)]
    assert sorted(itertools.chain(*sharded)) == list(range(n))
    assert all(held == sorted(held) for held in sharded)
    share = layout.padded(n, size) // size
    assert all(len(held) <= share for held in sharded)
    assert layout.padded(n, size) - n < layout.divisor(size)
    if n % layout.divisor(size) == 0:
        assert {len(held) for held in sharded} == {share}


@given(randoms, SIZES, st.integers(1, 60), st.integers(0, 2))
def test_shard_and_unshard_are_inverse(draw, size, n, dim):
    layout, shape = random_layout(draw, size, n), [2, 3, 4]
    shape[dim] = n
    x = torch.randn(shape)
    parts = [shard(x, dim, rank=r, size=size, layout=layout) for r in range(size)]
    assert torch.equal(unshard(parts, dim, layout=layout), x)
    assert torch.equal(unshard(parts, dim - 3, layout=layout), x)


@pytest.mark.parametrize(
    ("layout", "sharded"),
    [
        ("contiguous", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]),
        ("zigzag", [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),  # Megatron's
        ("stacked-zigzag:2", [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
        ("striped", [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]),
        ("block-striped:4", [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
        (
            Layout("zigzag-documents", ends=(0, 4, 16)),
            [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]],
        ),
    ],
    ids=str,
)
def test_layouts_are_what_they_say(layout, sharded):
    assert [positions(16, rank=r, size=2, layout=layout).tolist() for r in range(2)] == sharded


def test_what_does_not_divide_leaves_some_ranks_fewer():
    held = [len(positions(13, rank=r, size=4, layout="zigzag")) for r in range(4)]
    assert held == [2, 3, 4, 4]
    assert [len(positions(2, rank=r, size=4, layout="contiguous")) for r in range(4)] == [1, 1, 0, 0]


def test_layout_is_a_value_with_a_word():
    assert Layout.of("zigzag") == Layout("zigzag") == Layout.of(Layout("zigzag")) == Layout()
    assert Layout.of("stacked-zigzag:4") == Layout("stacked-zigzag", stacks=4)
    assert str(Layout.of("block-striped:128")) == "block-striped:128"
    cu = torch.tensor([0, 8, 8, 16])
    assert Layout("zigzag-documents", ends=cu) == Layout("zigzag-documents", ends=[0, 8, 16])
    assert len({Layout("zigzag"), Layout("zigzag"), Layout("contiguous")}) == 2
    with pytest.raises(TypeError, match="'blocks'.*legal: .*block"):
        Layout("zigzag", blocks=4)


@given(randoms, SIZES, st.integers(1, 100))
def test_the_table_of_runs_has_the_runs_of_all_ranks(draw, size, n):
    layout = random_layout(draw, size, n)
    runs = [[rank, *run_of(run)] for rank in range(size) for run in layout.runs(n, rank, size)]
    assert layout.run_table(n, size).tolist() == runs
    edges = layout.edges(n, size).tolist()
    assert edges == sorted(set(edges)) and edges[0] == 0 and edges[-1] < n


def run_of(run):
    return run.start, run.stop, run.step


def test_a_layout_goes_to_other_processes():
    layout = Layout("chunks", chunks=((0, 3), (1, 2)))
    hash(layout)
    code = (
        "import pickle, sys; x = pickle.load(sys.stdin.buffer); "
        "print({x: 1}[type(x)(x.kind, chunks=x.chunks)])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(layout), capture_output=True)
    assert done.stdout.strip() == b"1", done.stderr


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout("stripes"), "stripes.*zigzag.*striped"),
        (lambda: Layout.of(3), "3"),
        (lambda: Layout.of("zigzag:2"), "zigzag:2"),
        (lambda: Layout.of("block-striped"), "block-striped.*legal"),
        (lambda: Layout.of("stacked-zigzag:0"), "stacks >= 1"),
        (lambda: Layout("zigzag", block=4), "block is for layout block-striped only"),
        (lambda: Layout("chunks", chunks=((0, 1), (1, 2))), "every chunk to one rank"),
        (lambda: Layout("chunks"), "needs the chunks"),
        (lambda: Layout("chunks", chunks=((), ())), "at least one"),
        (lambda: Layout("chunks", chunks=3), "numbers of the chunks.*got 3"),
        (lambda: Layout("zigzag-documents", ends=7), "cu_seqlens.*got 7"),
        (lambda: Layout("chunks", chunks=((0,), (1,))).divisor(4), "for 2 ranks, not for 4"),
        (lambda: Layout.of("block-striped:6").divisor(4), "multiple of 4"),
        (lambda: Layout("zigzag-documents", ends=(0, 4, 10)).divisor(2), "multiples of 4.*10"),
        (
            lambda: positions(12, rank=0, size=2, layout=Layout("zigzag-documents", ends=(0, 8))),
            "end at 8.*12",
        ),
        (lambda: positions(0, rank=0, size=4, layout="zigzag"), "at least one token"),
        (lambda: positions(8, rank=4, size=4, layout="zigzag"), "rank 4 of size 4"),
        (lambda: unshard([], 0), "one part per rank"),
        (lambda: unshard([torch.zeros(2), torch.zeros(2)], 1), "one part per rank"),
        (lambda: unshard([torch.zeros(()), torch.zeros(2)], 0), "one part per rank"),
        (lambda: unshard([torch.zeros(2, 3), torch.zeros(2, 4)], 0), "one shape"),
        (
            lambda: unshard([torch.zeros(4), torch.zeros(2)], 0),
            r"shards 6 tokens over 2 ranks as \[2, 4\], got \[4, 2\]",
        ),
    ],
)
def test_bad_input_says_what_came_and_what_is_legal(call, words):
    with pytest.raises(ValueError, match=words):
        call()
