"""Rollouts as a tree in a Megatron model over a ring, beside rows apart in Megatron's own attention."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from models import MLA, VOCAB, Case, build, needs_019, start_megatron
from ranks import on_ranks, processes
from torch import nn

from burst_mcore import shard
from burst_mcore.rollouts import fold
from burst_mcore.rollouts.columns import TREE
from burst_mcore.rollouts.megatron import in_tree
from burst_mcore.rollouts.trees import depths, padded


def rollouts():
    """A prompt of 20 tokens, two first turns, each with two second turns; all but the prompt are labels."""
    draw = torch.Generator().manual_seed(3)
    prompt, *turns = (torch.randint(0, VOCAB, (n,), generator=draw) for n in (20, 5, 9, 7, 3, 8, 4))
    rows = [torch.cat([prompt, turns[i // 2], turns[2 + i]]) for i in range(4)]
    return rows, [torch.arange(len(row)) >= 20 for row in rows], [1.0, -0.5, 2.0, 0.25]


def apart(model):
    """The weighted mean loss of labels, of one rollout after another."""
    rows, labelled, weights = rollouts()
    losses, counts = [], []
    for row, label, weight in zip(rows, labelled, weights, strict=True):
        loss = model(row[None, :-1], torch.arange(len(row) - 1)[None], None, labels=row[None, 1:])[0]
        losses.append(weight * (loss * label[1:]).sum())
        counts.append(label[1:].sum())
    return torch.stack(losses).sum() / torch.stack(counts).sum()


def folded(model, group, params_of):
    """This rank's part of the same loss, of one row with a tree."""
    batch = dict(fold(*rollouts()).batch)
    items, tree = batch.pop("num_items_in_batch"), batch.pop(TREE)
    rank, size = group.rank(), group.size()
    more = -batch["input_ids"].shape[1] % (2 * size)
    tree = padded(tree, more)
    n = batch["input_ids"].shape[1] + more
    params = params_of(n)
    part = {
        name: shard(torch.nn.functional.pad(x, (0, more)), 1, rank=rank, size=size, layout="zigzag")
        for name, x in batch.items()
    }
    with in_tree(model, params, tree):
        labels = part["shift_labels"].clamp(min=0)
        loss = model(part["input_ids"], part["position_ids"], None, labels=labels, packed_seq_params=params)
    return (loss * part["label_weights"]).sum() / items


def params_of(n):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, n], dtype=torch.int32)
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=n, max_seqlen_kv=n)


def trained(rank, size, case):
    from megatron.core import parallel_state

    start_megatron(context_parallel_size=size)
    model = build(case._replace(cp=size))
    if case.attention == "default":
        loss = apart(model)
    else:
        loss = folded(model, parallel_state.get_context_parallel_group(), params_of)
    loss.backward()
    loss = loss.detach()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    for x in (loss, *gradients.values()):
        dist.all_reduce(x)
    return loss, gradients


@pytest.mark.proves(
    "rollouts that share prefixes, as a tree", "CP 2 with full recompute; CP 4 with windows; CP 1"
)
@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, {"recompute": "full"}),
        (4, {"fields": (("window_size", (5, 0)), ("window_attn_skip_freq", 2))}),
        pytest.param(1, {"position": "learned_absolute"}, marks=pytest.mark.slow),
    ],
)
def test_rollouts_as_a_tree(size, case):
    ((want, gradients),) = processes(1, trained, Case(attention="default", **case))
    for loss, found in processes(size, trained, Case(**case)):
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, gradients, rtol=2e-5, atol=2e-6)


class Halved(RotaryEmbedding):
    def get_emb(self, *args, **options):
        return super().get_emb(*args, **options) / 2


@needs_019
@on_ranks(1)
def test_models_that_do_not_know_branches_are_refused(rank, size):
    from megatron.core.packed_seq_params import PackedSeqParams

    start_megatron()
    tree = fold(*rollouts()).batch[TREE]
    n = int(tree.view(2, -1)[1].sum())
    model, recurrence = build(Case()), nn.Module()
    recurrence.self_attention = nn.Linear(2, 2)
    a_child_first, numbers = torch.tensor([1, -1, 3, 3]), torch.tensor([-1.0, n])
    row = "cu_seqlens_q must be of the whole row, [0, 59], got"
    other = "does not know the branches of a tree"
    for asked, params, given, words in (
        (model, params_of(n), tree, None),
        ([model, build(Case())], params_of(n), tree, None),
        (build(Case(attention="default")), params_of(n), tree, f"(DotProductAttention) {other}"),
        (build(Case(fields=MLA)), params_of(n), tree, other),
        ([model, recurrence], params_of(n), tree, f"1.self_attention (Linear) {other}"),
        ([model, nn.Conv1d(1, 1, 1)], params_of(n), tree, f"1 (Conv1d) {other}"),
        (MultimodalRotaryEmbedding(8, 1.0), params_of(n), tree, f"(MultimodalRotaryEmbedding) {other}"),
        (model, params_of(n - 1), tree, f"{row} [0, 58]"),
        (model, None, tree, f"{row} None"),
        (model, PackedSeqParams("thd"), tree, f"{row} None"),
        (model, params_of(n), a_child_first, "the parent of node 0 must be"),
        (model, params_of(n), torch.tensor([-1, 2, 3]), "a tree has one dim, parents and then lengths"),
        (model, params_of(n), numbers, "a tree must be integers, got torch.float32"),
    ):
        refusing = nullcontext() if words is None else pytest.raises(ValueError, match=re.escape(words))
        with refusing, in_tree(asked, params, given):
            pass
    halved = Halved(16, 1.0, use_cpu_initialization=True)  # whatever a class makes of its table
    with in_tree(halved, params_of(n), tree):
        table = halved(n, packed_seq=True)
    torch.testing.assert_close(table, halved(n)[depths(tree)], rtol=0, atol=0)
