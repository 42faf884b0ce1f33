"""Rollouts folded into one row beside the same rollouts as rows of their own, in float64."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import brute, random_tree, randoms
from test_mask import from_bands

from burst_mcore import Mask, Topology, burst_attention
from burst_mcore.rollouts import fold, tree_mask
from burst_mcore.rollouts.columns import TREE, WEIGHTS, Columns
from burst_mcore.rollouts.trees import depths, padded
from burst_mcore.transformers.data.batches import why_not_its_row

WORDS, WIDTH = 5, 8
TWO = torch.tensor([-1, 0, 3, 3])


def random_rollouts(draw: random.Random) -> list[list[int]]:
    """Up to two groups of up to six rollouts, which branch off one another anywhere, or nowhere."""
    rollouts = []
    for _ in range(draw.randint(1, 2)):
        rollouts.append([draw.randrange(WORDS) for _ in range(draw.randint(1, 12))])
        for _ in range(draw.randint(0, 5)):
            before = draw.choice(rollouts)
            own = [draw.randrange(WORDS) for _ in range(draw.choice([0, 0, 1, 3, 6]))]
            rollouts.append((before[: draw.randint(0, len(before))] + own) or [0])
    return rollouts


class Model:
    """Two layers of causal attention in float64, the second with a window; positions are learned."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        shapes = ((WORDS, WIDTH), (64, WIDTH), (2, WIDTH, 3 * WIDTH), (WIDTH, WORDS))
        self.weights = [  # small ones, since scores of hundreds would magnify what is rounded
            (torch.randn(shape, generator=generator, dtype=torch.float64) / 2).requires_grad_()
            for shape in shapes
        ]

    def __call__(self, ids, positions, attend, window):
        embedding, places, layers, head = self.weights
        x = (embedding[ids] + places[positions])[None]
        for layer, left in zip(layers, (None, window), strict=True):
            q, k, v = ((x @ layer).unflatten(-1, (3, 2, -1)))[:, :, :].unbind(2)
            x = x + attend(q, k, v, left).flatten(2)
        return (x @ head)[0]


def attend_apart(q, k, v, left):
    """Dense attention of one rollout."""
    at = torch.arange(q.shape[1])
    back = at[:, None] - at[None, :]
    seen = (back >= 0) if left is None else (back >= 0) & (back <= left)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def statistics(logits, labels):
    """Log-probabilities of labels and entropies; 0 without a label."""
    table = logits.log_softmax(-1)
    both = torch.stack([table.gather(-1, labels.clamp(min=0)[:, None])[:, 0], -(table.exp() * table).sum(-1)])
    return both.where(labels >= 0, 0.0)


def total(stats, upstream):
    """A loss that treats each token of each rollout in its own way."""
    return sum((found * up[:, : found.shape[1]]).sum() for found, up in zip(stats, upstream, strict=True))


@settings(max_examples=60, deadline=None)
@given(randoms, st.integers(0, 6), st.integers(0, 3))
def test_statistics_and_gradients_are_those_of_rows_apart(draw, window, padding):
    rollouts = random_rollouts(draw)
    labelled = [[draw.random() < 0.7 for _ in row] for row in rollouts]
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(len(rollouts), 2, 32, generator=generator, dtype=torch.float64)
    model = Model()

    want = []
    for row, label in zip(rollouts, labelled, strict=True):
        ids = torch.tensor(row)
        target = torch.where(torch.tensor(label), ids, -100)[1:]
        logits = model(ids, torch.arange(len(ids)), attend_apart, window)
        want.append(statistics(logits, torch.cat([target, torch.tensor([-100])])))
    gradients = torch.autograd.grad(total(want, upstream), model.weights)

    folded = fold(rollouts, labelled)
    tree = padded(folded.batch[TREE], padding)

    def attend(q, k, v, left):
        mask = tree_mask(tree, Mask.full() if left is None else Mask.window(left, 0))
        return burst_attention(q, k, v, topology=Topology.single(), mask=mask)

    ids, labels = (
        torch.nn.functional.pad(folded.batch[name][0], (0, padding), value=fill)
        for name, fill in (("input_ids", 0), ("shift_labels", -100))
    )
    logits = model(ids, depths(tree), attend, window)
    log_p, entropy = (folded.unfold(x[None]) for x in statistics(logits, labels))
    found = [torch.stack([log_p[i], entropy[i]])[:, : len(row)] for i, row in enumerate(rollouts)]
    for mine, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    loss = total(found, upstream)
    for mine, theirs in zip(torch.autograd.grad(loss, model.weights), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=100, deadline=None)
@given(randoms)
def test_a_row_has_each_token_with_its_label_once(draw):
    rollouts = [tuple(row) for row in random_rollouts(draw)]
    folded = fold(rollouts)
    ids, labels, positions = (folded.batch[x][0] for x in ("input_ids", "shift_labels", "position_ids"))
    for row, places in zip(rollouts, folded.places, strict=True):
        places = places[places >= 0]
        assert ids[places].tolist() == [*row]
        assert labels[places][:-1].tolist() == [*row[1:]]
        assert positions[places].tolist() == [*range(len(row))]
    prefixes = {row[:i] for row in rollouts for i in range(2, len(row) + 1)}
    ends = {row for row in rollouts if not any(row == other[: len(row)] != other for other in rollouts)}
    assert folded.tokens == len(prefixes) + len(ends)
    trie = {row[:i] for row in rollouts for i in range(1, len(row) + 1)}
    assert len(trie) <= folded.tokens < len(trie) + len(rollouts)
    assert torch.equal(depths(folded.batch[TREE]), positions)
    parents = folded.batch[TREE].view(2, -1)[0].tolist()
    children = [child for child, parent in enumerate(parents) if parent >= 0]
    assert all(folded.batch[TREE].view(2, -1)[1] > 0) and all(parents[c] < c for c in children)


@settings(max_examples=100, deadline=None)
@given(randoms, st.integers(1, 40), st.integers(0, 12))
def test_a_window_counts_tokens_along_a_rollout(draw, n, left):
    (term,) = random_tree(draw, n).terms  # nodes in any order that has parents first, empty ones too
    tree = torch.cat([term.parents, term.ends.diff()])
    mask, depth = tree_mask(tree, Mask.window(left, 0)), depths(tree)
    seen = brute(Mask((term,)), n) & (depth[:, None] - depth[None, :] <= left)
    assert torch.equal(brute(mask, n), seen)
    assert torch.equal(from_bands(mask, n), seen.int())


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0, 0.25], [[0.5] * 5, 2.0, [0.0, 1.0, 4.0], 1.0]])
def test_the_loss_is_the_weighted_mean_over_the_labels_of_all_rollouts(weights):
    rollouts = [[1, 2, 3, 4, 1], [1, 2, 3, 0], [1, 2, 3], [1, 2, 4, 4, 4]]
    labelled = [[0, 0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1], [1] * 5]
    model, losses = Model(), []
    for i, (row, label) in enumerate(zip(rollouts, labelled, strict=True)):
        logits = model(torch.tensor(row), torch.arange(len(row)), attend_apart, None)
        each = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="none")
        factor = torch.as_tensor(1.0 if weights is None else weights[i]).expand(len(row))
        losses.append((each * factor[1:])[torch.tensor(label[1:]).bool()])
    want = torch.cat(losses).mean()
    batch = fold(rollouts, labelled, weights).batch
    mask = tree_mask(batch[TREE])

    def attend(q, k, v, _):
        return burst_attention(q, k, v, topology=Topology.single(), mask=mask)

    logits = model(batch["input_ids"][0], batch["position_ids"][0], attend, None)
    kept = {name: batch[name] for name in ("shift_labels", "num_items_in_batch")}
    loss = Columns(weights=batch[WEIGHTS]).loss(logits, **kept)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)


def test_a_tree_that_is_given_says_what_is_shared():
    nodes, parents = [[7, 7], [1, 2], [1, 3], [5], [6], []], [-1, 0, 0, 1, 1, 2]
    folded = fold(nodes, [[0, 0], [1, 1], [0, 1], [1], [1], []], parents=parents)
    paths = [[7, 7, 1, 2, 5], [7, 7, 1, 2, 6], [7, 7, 1, 3]]
    for path, places in zip(paths, folded.places, strict=True):
        assert folded.batch["input_ids"][0, places[places >= 0]].tolist() == path
    assert folded.tokens == 10  # 7 7 1 2 5, 2 6, 7 1 3: a branch begins with its own copy of what was before
    assert folded.labelled.tolist() == [
        [False, True, True, True, False],
        [False, True, True, True, False],
        [False, False, True, False, False],
    ]
    assert fold(paths).tokens == 9  # by comparison two nodes begin with the same token


def test_what_unfolds_has_numbers_of_every_token_where_asked():
    folded = fold([[1, 2, 3], [1, 2, 4, 5]], [[0, 0, 1], [0, 0, 0, 1]])
    x = torch.arange(1.0, 8.0)[None, : folded.tokens]
    assert folded.unfold(x).tolist() == [[0, 2, 0, 0], [0, 0, 5, 0]]
    assert folded.unfold(x, labels_only=False).tolist() == [[1, 2, 3, 0], [1, 4, 5, 6]]
    assert folded.unfold(x[..., None].expand(-1, -1, 2)).shape == (2, 4, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fold([]), "there are no rollouts"),
        (lambda: fold([[1], []]), r"rollouts \[1\] have no tokens"),
        (lambda: fold([[1.5]]), "token ids of rollout 0 must be integers, got torch.float32"),
        (lambda: fold([[1, None]]), "token ids of rollout 0 must be integers .*NoneType"),
        (lambda: fold([[[1]]]), r"token ids of rollouts \[0\] must be in one dim"),
        (
            lambda: fold([[1, 2]], [[1]]),
            r"labelled of rollout 0 are 1 or 2 finite numbers, got \[1.0\]",
        ),
        (lambda: fold([[1, 2], [1]], [[1, 1]]), "labelled must have an entry for each of 2 rollouts, got 1"),
        (lambda: fold([[1], [2]], weights=[1, 2, 3]), "weights must have an entry .* 2 rollouts, got 3"),
        (lambda: fold([[1], [2]], weights=0.5), "weights must be a list, with an entry .* got 0.5"),
        (lambda: fold([[1]], [["yes"]]), "labelled of rollout 0 must be numbers"),
        (
            lambda: fold([[1, 2]], [[0, float("nan")]]),
            r"labelled of rollout 0 are 1 or 2 finite numbers, got \[0.0, nan",
        ),
        (
            lambda: fold([[1], [2]], weights=[1, float("inf")]),
            "weights of rollout 1 are 1 or 1 finite numbers, got inf",
        ),
        (lambda: fold([[1, 2]]).unfold(torch.zeros(2, 2)), r"\[1, 2 or more, ...\], got \[2, 2\]"),
        (lambda: fold([[1], [2]], parents=[1, -1]), "parent of node 0 must be a node before it.*got 1"),
        (lambda: fold([[1], [2]], parents=[-1]), "a number for each node"),
        (lambda: tree_mask(torch.tensor([-1, 0, 3])), r"parents and then lengths, got \(3,\)"),
        (lambda: tree_mask([-1, 2.0]), "a tree must be integers, got torch.float32"),
        (lambda: tree_mask(None), "a tree must be integers .*NoneType"),
        (lambda: depths(torch.tensor([1, 0, 3, 3])), "parent of node 0"),
        (lambda: tree_mask(padded(TWO, -1)), "lengths must be numbers of tokens >= 0, got -1 for node"),
        (lambda: tree_mask(TWO, "causal"), r"Mask.causal\(\) or Mask.window\(\), got causal"),
        (
            lambda: tree_mask(TWO, Mask.window(3, 0) & Mask.documents([0, 2, 6])),
            "got window.* & documents",
        ),
    ],
)
def test_bad_rollouts_are_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_batches_that_do_not_go_with_their_tree():
    batch = fold([[1, 2, 3], [1, 2, 4, 5]]).batch
    n = batch["input_ids"].shape[1]
    real = torch.ones(1, n, dtype=torch.bool)
    assert why_not_its_row(batch, real) is None
    cases = (
        ({}, real[:, :-1], "add up to 6, but the sequence has 5"),
        ({}, real.expand(2, -1), "one packed row, the batch has 2"),
        ({}, real & (torch.arange(n) > 0), "no padding and no cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, n])}, real, "no padding and no cu_seqlens"),
        ({"shift_labels": None}, real, "needs shift_labels"),
        ({"position_ids": torch.arange(n)[None]}, real, "not the depths of its tree"),
    )
    for other, tokens, words in cases:
        assert words in why_not_its_row({**batch, **other}, tokens)
