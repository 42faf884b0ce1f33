"""Rollouts as a tree, folded into one row over ranks, beside the same rollouts as rows of one process."""

import pytest
import torch
import torch.distributed as dist
from causal_lms import VOCABULARY, model_of
from counting import count_pairs
from loops import assert_alike, gradients_of, mesh_of, refuses
from ranks import on_ranks, processes
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache

from burst_mcore.rollouts import fold
from burst_mcore.torch import parallelize

TEMPERATURE, RATE = 0.7, 0.1
TEMPERED = {
    "kind": "Llama4Text", "attention_chunk_size": None, "floor_scale": 4, "attn_scale": 0.5,
    "no_rope_layer_interval": 2, "interleave_moe_layer_step": 5, "intermediate_size_mlp": 40,
}  # fmt: skip
"""A layer without rotary positions, which scales queries by their places."""


def group(prompt=90, answer=10, count=8):
    """Rollouts of one prompt: each with an answer of its own, from its first token on."""
    draw = torch.Generator().manual_seed(1)
    shared, *answers = (
        torch.randint(3, VOCABULARY, (n,), generator=draw) for n in (prompt, *[answer] * count)
    )
    for i, each in enumerate(answers):
        each[0] = 3 + i
    rows = [torch.cat([shared, each]) for each in answers]
    return rows, [torch.arange(len(row)) >= prompt for row in rows]


def turns():
    """Rollouts of two prompts and two turns, which share labels; of one, another is the beginning."""
    draw = torch.Generator().manual_seed(5)
    a, b, first, other, *last = (
        torch.randint(3, VOCABULARY, (n,), generator=draw) for n in (11, 7, 9, 6, 8, 5, 12)
    )
    rows = [
        torch.cat(x) for x in ([a, first, last[0]], [a, first, last[1]], [a, first], [b, other, last[2]], [b])
    ]
    starts = (11, 11, 11, 7, 3)
    labelled = [
        (torch.arange(len(row)) >= at) & (torch.arange(len(row)) != 14)
        for row, at in zip(rows, starts, strict=True)
    ]
    return rows, labelled, [1.0, -0.5, 2.0, 0.25, 1.0]


def policy_loss(log_p, entropy, old, advantages, labelled):
    """GRPO's: a clipped ratio, and a bonus of entropy; the mean of each rollout's mean."""
    ratio = (log_p - log_p.detach() + old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages) + 0.05 * entropy
    return -((gain * labelled).sum(1) / labelled.sum(1)).mean()


def old_and_advantages(rows):
    draw = torch.Generator().manual_seed(2)
    old = 0.1 * torch.randn(len(rows), max(map(len, rows)), generator=draw)
    return old, torch.randn(len(rows), 1, generator=draw)


def policy_apart(rows, labelled, kind):
    """(loss, gradients) of one process that has a row for each rollout."""
    model, stats = model_of(**kind), []
    for row, label in zip(rows, labelled, strict=True):
        table = (model(input_ids=row[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        each = table.gather(1, row[1:, None])[:, 0], -(table.exp() * table).sum(1), torch.ones(len(row) - 1)
        stats.append(torch.nn.functional.pad(torch.stack(each) * label[1:], (0, 1)))
    log_p, entropy, real = torch.stack(stats, 1)
    loss = policy_loss(log_p, entropy, *old_and_advantages(rows), real)
    loss.backward()
    return loss.item(), gradients_of(model)


def policy_folded(rank, size, layout, kind, rows, labelled):
    model, mesh = model_of(**kind), mesh_of(size)
    cp = parallelize(model, mesh, config={"layout": layout})
    policy, folded = DistributedDataParallel(model), fold(rows, labelled)
    log_p, entropy = cp.rollout_stats(policy, folded, TEMPERATURE)
    loss = policy_loss(log_p, entropy, *old_and_advantages(rows), folded.labelled)
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("zigzag", {}),
        ("striped", {"kind": "Gemma2", "sliding_window": 16}),
        ("striped", TEMPERED),
        pytest.param("contiguous", {"kind": "Qwen3"}, marks=pytest.mark.slow),
        pytest.param("zigzag", {"kind": "GptOss", "sliding_window": 7}, marks=pytest.mark.slow),
    ],
)
def test_a_policy_gradient_of_a_group_is_that_of_its_rows(layout, kind):
    rows, labelled = group()
    want = policy_apart(rows, labelled, kind)
    assert_alike(processes(4, policy_folded, layout, kind, rows, labelled), want, 1e-5, 4e-6)


def stepped_apart(rows, labelled, weights):
    """(loss, weights after a step) of one process: the weighted mean over the labels of all rows."""
    model, losses = model_of(), []
    for row, label, weight in zip(rows, labelled, weights, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        losses.append(weight * cross_entropy(logits, row[1:], reduction="none")[label[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return loss.item(), {name: p.detach() for name, p in model.named_parameters()}


def stepped(rank, size, options, rows, labelled, weights):
    model, mesh = model_of(), mesh_of(size)
    cp = parallelize(model, mesh, **options)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    (batch,) = cp.loader([fold(rows, labelled, weights).batch])
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item(), {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "options", [{"checkpointing": "segment"}, {"loss": "model", "config": {"layout": "striped"}}]
)
def test_a_step_on_a_tree_is_that_of_weighted_rows(options):
    rows, labelled, weights = turns()
    want = stepped_apart(rows, labelled, weights)
    assert_alike(processes(3, stepped, options, rows, labelled, weights), want, 1e-5, 1e-6)


def counted(rank, size, rows, labelled):
    """(tokens, pairs, bytes) of this rank: of rows apart, and of a tree."""
    pairs, sent, batch = count_pairs(), [], dist.batch_isend_irecv

    def counting(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = counting
    model, found = model_of(num_hidden_layers=1, max_position_embeddings=1024), []
    mesh = mesh_of(size)
    cp = parallelize(model, mesh, config={"layout": "striped"}, reduction="mean")
    apart = {"input_ids": torch.stack(rows), "labels": torch.stack(rows).where(torch.stack(labelled), -100)}
    for whole in (apart, fold(rows, labelled).batch):
        pairs.clear()
        sent.clear()
        loss = model(**cp.shard(whole)).loss
        loss.backward()
        found.append((whole["input_ids"].numel(), pairs["forward"], sum(sent), loss.item()))
    return found


def test_a_tree_has_a_fifth_of_the_tokens_and_bytes_and_a_third_of_the_pairs():
    every = processes(4, counted, *group(900, 100))
    (apart, _, _, loss), (tree, _, _, same) = every[0]
    assert loss == pytest.approx(same, rel=1e-5)
    assert (apart, tree) == (8000, 1707)  # the last token of the prompt stands in each branch
    pairs = [sum(found[i][1] for found in every) for i in range(2)]
    assert pairs == [8 * 1000 * 1001 // 2, 899 * 900 // 2 + 8 * (101 * 899 + 101 * 102 // 2) + 1]
    assert pairs[0] / pairs[1] > 3.4  # with one token of padding
    sent = [sum(found[i][2] for found in every) for i in range(2)]
    assert sent[0] / sent[1] == pytest.approx(8000 / 1708, rel=0.01)
    most = max(found[1][1] for found in every)
    assert most < 1.01 * pairs[1] / 4  # striped rows are balanced under a tree as well


@on_ranks(2)
def test_what_does_not_know_branches_is_refused_by_name_on_all_ranks(rank, size):
    mesh, rows = mesh_of(size), turns()[0]
    batch = fold(*turns()).batch
    chunked = {"kind": "Llama4Text", "attention_chunk_size": 512, "interleave_moe_layer_step": 5}
    hybrid = {"kind": "Lfm2", "layer_types": ["conv", "full_attention"]}
    cp, of_chunks, of_states, striped = (
        parallelize(model_of(**kind), mesh, reduction="mean", **options)
        for kind, options in (({}, {}), (chunked, {}), (hybrid, {}), ({}, {"config": {"layout": "striped"}}))
    )
    other = fold([*rows, torch.arange(3, 9)] if rank else rows).batch
    part = cp.shard(batch)
    tree, weights, cache = batch["tree"], batch["label_weights"], DynamicCache()
    lists = cp.shard({**batch, "tree": tree.tolist(), "label_weights": weights.tolist()})
    torch.testing.assert_close(lists, part, rtol=0, atol=0)
    assert "tree" not in cp.shard({"input_ids": batch["input_ids"], "tree": None})

    def forward(**columns):
        return lambda: cp.model(**{**part, **columns})

    def sharded_by(other):
        return lambda: other.model(**other.shard(batch))

    def sharded(**columns):
        return lambda: cp.shard({**batch, **columns})

    def of_last(name):
        return "another rank: rank 1 of the ring refused this call: UnsupportedError: unsupported (", name

    refuses(
        ("tree: attention in chunks does not", sharded_by(of_chunks)),
        ("tree: Lfm2ShortConv does not know", sharded_by(of_states)),
        ("tree: a cache does not know", forward(past_key_values=cache, use_cache=True)),
        ("layout: layout zigzag shards 118 tokens over 2 ranks", lambda: cp.model(**batch)),
        ("tree: position_ids of the whole row", lambda: cp.model(**striped.shard(batch))),
        ("batch: ranks of a CP group were given different whole", lambda: cp.shard(other)),
        ("tree", sharded(tree=tree[:-2])),
        ("tree: it needs shift_labels", sharded(shift_labels=None)),
        ("tree: ranks of a CP group have dif", forward(tree=tree if rank else part["tree"])),
        ("label_weights: ... , (1, 59) as input_ids are", sharded(label_weights=weights[0])),
        ("batch: label_weights must be a tensor, or", sharded(label_weights="half")),
        ("tree: a tree has one dim, parents and then", sharded(tree=tree.view(2, -1))),
        ("tree: a tree must be integers, got torch.float32", sharded(tree=tree.float())),
        ("batch: tree must be a tensor, or lists of numbers", sharded(tree=[["a root"]])),
        ("label_weights: they must be [1, 30] as ... got list", forward(label_weights=[0.5])),
        ("tree: a tree must be integers, got", forward(tree=part["tree"].float())),
        (of_last("tree"), forward(tree=part["tree"].flip(0) if rank else part["tree"])),
        (of_last("label_weights"), forward(label_weights=[0.5] if rank else part["label_weights"])),
    )
