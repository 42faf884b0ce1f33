"""Masks are values with a definition, `allows`; bands, work and layouts follow it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import brute, random_mask, random_union, randoms

from burst_mcore import Layout, Mask
from burst_mcore.layout import positions
from burst_mcore.layout.balance import imbalance, keys_per_query, work
from burst_mcore.mask import SLICES
from burst_mcore.rollouts import tree_mask
from burst_plan.simulate.cost import allowed_pairs


def from_bands(mask, n):
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    times = torch.zeros(n, n, dtype=torch.int)
    for q0, q1, k0, k1, low, high in mask.bands(n).tolist():
        inside = (i >= q0) & (i < q1) & (j >= k0) & (j < k1) & (j - i >= low) & (j - i <= high)
        times += (inside & ((i - j) % mask.stride == 0)).int()
    return times


@settings(max_examples=200, deadline=None)
@given(randoms, st.integers(1, 60))
def test_bands_hold_every_allowed_pair_once(draw, n):
    mask, at = random_mask(draw, n), torch.arange(n, dtype=torch.int32)
    assert torch.equal(from_bands(mask, n), brute(mask, n).int())
    assert torch.equal(mask.allows(at, at), brute(mask, n))


def test_many_bands_in_any_order_meet_as_few_do():
    """More than 2^14 pairs of bands, which are found through an order of one of the lists."""
    draw, n = random.Random(0), 360
    slices = [(at, at + draw.randint(1, 3)) for at in range(0, n - 3, 2)]
    keys = [sorted(draw.sample(range(n + 1), 2)) for _ in slices]
    draw.shuffle(slices)
    mask = Mask.ranges(slices, keys, [draw.choice(SLICES) for _ in slices])
    ends = [0, *sorted(draw.sample(range(1, n), 99)), n]
    for both in (mask & Mask.documents(ends), mask | Mask.documents(ends)):
        assert torch.equal(from_bands(both, n), brute(both, n).int())


@settings(max_examples=100, deadline=None)
@given(randoms, st.integers(1, 60))
def test_work_is_counted(draw, n):
    mask = random_mask(draw, n)
    seen = brute(mask, n).long()
    assert torch.equal(keys_per_query(mask, n), seen.sum(1))
    assert torch.equal(keys_per_query(mask, n, transposed=True), seen.sum(0))
    assert allowed_pairs(mask, n) == seen.sum()
    for layout in map(Layout, ("zigzag", "striped")):
        of_queries, of_keys = work(layout, mask, n, 3)
        for rank in range(3):
            at = positions(n, rank=rank, size=3, layout=layout)
            assert of_queries[rank] == seen[at].sum()
            assert of_keys[rank] == seen[:, at].sum()


@given(randoms, st.integers(1, 40))
def test_a_union_is_that_of_pairs_in_any_order(draw, n):
    a, b = random_union(draw, n), random_union(draw, n)
    assert torch.equal(brute(a | b, n), brute(a, n) | brute(b, n))
    assert a | b == b | a
    assert hash(a | b) == hash(b | a)


@given(randoms, st.integers(1, 40))
def test_intersection_is_that_of_pairs_in_any_order(draw, n):
    a, b = random_mask(draw, n), random_mask(draw, n)
    assert torch.equal(brute(a & b, n), brute(a, n) & brute(b, n))
    assert a & b == b & a
    assert hash(a & b) == hash(b & a)


def test_the_definitions():
    n = 12
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    doc = torch.tensor([0] * 3 + [1] * 1 + [2] * 8)
    matrix = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]]).bool()
    image = torch.tensor([0, 1, 1, 1, 0, 0, 2, 2, 2, 0, 0, 0])
    first = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]).bool()
    node = torch.tensor([0] * 3 + [1] * 4 + [2] * 2 + [3] * 3)
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    for mask, want in (
        (Mask.full(), i == i + 0 * j),
        (Mask.causal(), j <= i),
        (Mask.window(3, 1), (i - 3 <= j) & (j <= i + 1)),
        (Mask.window(-1, 0), j <= i),
        (Mask.window(None, 2), j <= i + 2),
        (Mask.dilated(5, 2), ((i - j).abs() < 5) & ((i - j) % 2 == 0)),
        (Mask.documents([0, 3, 3, 4, 12]), doc[i] == doc[j]),
        (Mask.blocks(matrix, 5), matrix[i // 5, j // 5]),
        (Mask.ranges([(2, 8)], [(4, 9)]), (i >= 2) & (i < 8) & (j >= 4) & (j < 9)),
        (Mask.ranges([(2, 8)], [(4, 9)], "causal"), (i >= 2) & (i < 8) & (j >= 4) & (j < 9) & (j - i <= 1)),
        (
            Mask.ranges([(2, 8)], [(4, 9)], ["inverse_causal"]),
            (i >= 2) & (i < 8) & (j >= 4) & (j < 9) & (j - i >= 2),
        ),
        (Mask.chunked(5), i // 5 == j // 5),
        (Mask.images([(6, 9), (1, 4), (4, 4)]), image[i] * image[j] * (image[i] == image[j]) > 0),
        (Mask.causal() | Mask.images([(1, 4), (6, 9)]), (j <= i) | (image[i] * (image[i] == image[j]) > 0)),
        (Mask.prefix(5), (j <= i) | ((i < 5) & (j < 5))),
        (Mask.prefix(torch.tensor(5)), (j <= i) | ((i < 5) & (j < 5))),
        (
            Mask.prefix([2, 0, 0, 5], [0, 3, 3, 4, 12]),
            (doc[i] == doc[j]) & ((j <= i) | (first[i] & first[j])),
        ),
        (Mask.prefix([2, 0, 5], [0, 3, 4, 12]), (doc[i] == doc[j]) & ((j <= i) | (first[i] & first[j]))),
        (Mask.tree([-1, 0, 1, 0, -1], [3, 2, 1, 0, 6]), (j <= i) & ((i < 6) | (j >= 6))),
        (Mask.tree([-1, 0, 0, 1], [3, 4, 2, 3]), (j <= i) & sees[node[i], node[j]]),
    ):
        assert torch.equal(brute(mask, n), want.expand(n, n)), mask
        assert torch.equal(from_bands(mask, n), want.expand(n, n).int()), mask
    assert Mask.dilated(4, 1) & Mask.causal() == Mask.window(3, 0)
    assert Mask.window(None, None) == Mask.full()
    both = Mask.ranges([(0, 6), (2, 9)], [(0, 6), (1, 4)], ["causal", "full"])  # they overlap: their union
    assert torch.equal(
        brute(both, n),
        ((i < 6) & (j < 6) & (j <= i)) | ((i >= 2) & (i < 9) & (j >= 1) & (j < 4)),
    )
    assert from_bands(both, n).max() == 1


def test_masks_are_values():
    images = Mask.images([(1, 3), (4, 6)])
    assert len({Mask.causal() | images, images | Mask.causal(), images | Mask.causal() | images}) == 1
    assert Mask.causal() | Mask.causal() == Mask.causal() | Mask.images([]) == Mask.causal()
    assert Mask.causal() | Mask.full() == Mask.full() | images == Mask.full()
    assert str(Mask.causal() | images).startswith("(causal | images(2, #")
    assert (
        Mask.tree([-1, 0], [2, 3]) == Mask.tree(torch.tensor([-1, 0]), (2, 3)) != Mask.tree([-1, 0], [3, 2])
    )
    assert Mask.documents([0, 2, 5]) == Mask.documents(torch.tensor([0, 2, 5], dtype=torch.int32))
    assert Mask.documents([0, 2, 5]) != Mask.documents([0, 3, 5])
    assert Mask.causal() & Mask.tree([-1, 0], [2, 3]) == Mask.tree([-1, 0], [2, 3])


def test_the_mask_of_a_layer_stays_when_documents_and_branches_change():
    tree, packed, window = torch.tensor([-1, 0, 0, 2, 3, 4]), Mask.documents([0, 2, 9]), Mask.window(1, 0)
    assert tree_mask(tree).of_layer == (Mask.causal() & packed).of_layer == Mask.causal()
    assert tree_mask(tree, window).of_layer == (window & packed).of_layer == window
    assert packed.of_layer == Mask.full() and Mask.dilated(3, 2).of_layer == Mask.dilated(3, 2)
    assert len({Mask.causal(), Mask.window(-1, 0), Mask.full() & Mask.causal()}) == 1
    assert str(Mask.causal() & Mask.documents([0, 2, 5])).startswith("causal & documents(2, #")
    assert str(Mask.documents([0, 2, 5])) != str(Mask.documents([0, 3, 5]))  # ranks compare the words


def test_a_tensor_of_documents_is_read_again_when_it_changes():
    cu = torch.tensor([0, 4, 8])
    assert Mask.documents(cu) == Mask.documents([0, 4, 8])
    cu[1] = 3
    assert Mask.documents(cu) == Mask.documents([0, 3, 8])
    cu.untyped_storage().copy_(
        torch.tensor([0, 5, 8]).untyped_storage()
    )  # as numpy would, unnoticed by torch
    assert Mask.documents(cu) == Mask.documents([0, 5, 8])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Mask.window(-2, 0), "left must be a number of tokens >= 0.*-2"),
        (lambda: Mask.window(0, 1.5), "right.*1.5"),
        (lambda: Mask.dilated(0, 2), "window of a dilated mask.*0"),
        (lambda: Mask.dilated(4, 0), "dilation"),
        (lambda: Mask.documents([1, 4]), r"must be \[0, .*1, 4"),
        (lambda: Mask.documents([0, 5, 3, 8]), r"must not descend, got \[5, 3\] at 1"),
        (lambda: Mask.documents([0, 2.5, 8]), "integers"),
        (lambda: Mask.documents([0, 4, 8]).check(10), "end at 8.*10 tokens"),
        (lambda: Mask.blocks([[1, 0]], 4), r"square.*\[1, 2\]"),
        (lambda: Mask.blocks([[2]], 4), "boolean"),
        (lambda: Mask.blocks([[1]], 0), "block_size.*0"),
        (lambda: Mask.blocks(torch.ones(3, 3), 4).check(8), r"8 tokens in blocks of 4 must be \[2, 2\]"),
        (lambda: Mask.ranges([(0, 4)], [(0, 4), (2, 4)]), "one length, got 1, 2, 1"),
        (lambda: Mask.ranges([(3, 1)], [(0, 4)]), r"start <= stop, got \(3, 1\)"),
        (lambda: Mask.ranges([(0, 4)], [(0, 4)], "diagonal"), "diagonal.*'bi-causal'"),
        (lambda: Mask.ranges([(0, 100)], [(0, 8)], "inverse-causal").check(8), r"slice 0.*\[0, 100\)"),
        (lambda: (Mask.documents([0, 8]) & Mask.documents([0, 9])).check(8), "end at 9.*8 tokens"),
        (lambda: Mask.ranges([(0, 4)], [(0, 4)], None), "kinds must be names.*None"),
        (lambda: Mask(None), "None.* is no mask"),
        (lambda: Mask.dilated(4, 2) | Mask.causal(), "dilated mask cannot be part of a union.*every 2"),
        (lambda: Mask.chunked(0), "size of chunks.*0"),
        (lambda: Mask.images([(0, 4), (3, 6)]), r"must not overlap, got \[0, 4\] and \[3, 6\]"),
        (lambda: Mask.images([(2, 9)]).check(8), r"^image block \[2, 9\) goes beyond .* 8 tokens"),
        (lambda: Mask.prefix(9).check(8), r"^prefix \[0, 9\) goes beyond .* 8 tokens"),
        (
            lambda: (Mask.documents([0, 4, 8]) & (Mask.causal() | Mask.images([(2, 6)]))).check(8),
            r"^image block \[2, 6\) goes over the end of a document, at 4$",
        ),
        (lambda: (Mask.prefix(6) & Mask.documents([0, 4, 8])).check(8), r"^prefix \[0, 6\) goes .* at 4"),
        (lambda: Mask.prefix([2, 3]), r"prefix for each of 1 documents.*got lengths of shape .2,."),
        (lambda: Mask.prefix([2, 5], [0, 4, 8]), "document, 4, got 5"),
        (lambda: Mask.prefix(-1), "got -1"),
        (lambda: Mask.tree([-1, 2, 1], [1, 1, 1]), "parent of node 1 must be a node before it.*got 2"),
        (lambda: Mask.tree([-1, -2], [1, 1]), "parent of node 1 .*got -2"),
        (lambda: Mask.tree([-1, 0], [1]), r"number for each node, got \[-1, 0\] and \[1\]"),
        (lambda: Mask.tree([-1, 0], [1, -1]), "tokens >= 0, got -1 for node 1"),
        (lambda: Mask.tree([-1, 0], [1, 2.5]), "lengths must be integers"),
        (lambda: Mask.tree([-1, 0], [3, 4]).check(8), "add up to 7, but the sequence has 8"),
        (lambda: Layout.for_mask(Mask.causal(), 16, 0), "number of ranks"),
        (lambda: Layout.for_mask(Mask.causal(), 0, 2), "n must be a number of tokens.*0"),
        (lambda: Layout.for_mask(None, 16, 2), "mask must be a Mask.*None"),
    ],
)
def test_bad_masks_say_what_came_and_what_is_legal(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_an_image_may_begin_and_end_with_its_document():
    (Mask.documents([0, 4, 8]) & (Mask.causal() | Mask.images([(0, 4), (5, 8)]))).check(8)


def _packed(n, documents):
    return Mask.causal() & Mask.documents(
        [0, *sorted(random.Random(documents).sample(range(1, n), documents - 1)), n]
    )


@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize(
    ("mask", "even"),
    [
        (Mask.causal(), 1.05),
        (Mask.full(), 1.05),
        (_packed(2**18, 64), 1.05),
        (_packed(2**18, 200), 1.05),
        (_packed(2**18, 5000), 1.05),
        (Mask.blocks(torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.7, 4096), 1.05),
        (Mask.causal() & Mask.blocks(torch.ones(64, 64).tril().flip(1) + torch.eye(64) > 0, 4096), 1.05),
        (Mask.window(4095, 0), 1.10),
        (Mask.window(2**15, 0), 1.10),
        (Mask.window(2**16, 2**10), 1.10),
    ],
    ids=str,
)
def test_for_mask_balances(mask, even, size):
    n = 2**18
    layout = Layout.for_mask(mask, n, size)
    assert imbalance(layout, mask, n, size) <= even
    sharded = torch.cat([positions(n, rank=rank, size=size, layout=layout) for rank in range(size)])
    assert torch.equal(sharded.sort().values, torch.arange(n))


@settings(max_examples=60, deadline=None)
@given(randoms, st.integers(1, 200), st.integers(1, 6))
def test_for_mask_gives_a_layout_for_any_mask(draw, n, size):
    mask = random_mask(draw, n)
    layout = Layout.for_mask(mask, n, size)
    simplest = imbalance(Layout("contiguous"), mask, n, size)
    assert imbalance(layout, mask, n, size) <= max(1.05, simplest)
