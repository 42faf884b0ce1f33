"""Rollouts as a tree in a Megatron model over a ring, beside rows apart in Megatron's own attention."""

import pytest
import torch
import torch.distributed as dist
from models import MLA, VOCAB, Case, build, needs_019
from ranks import processes
from test_packed import WINDOW
from torch import nn

from burst_mcore import shard
from burst_mcore.megatron import cpu
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
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
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
        (4, {"fields": WINDOW}),
        pytest.param(1, {"position": "learned_absolute"}, marks=pytest.mark.slow),
    ],
)
def test_rollouts_as_a_tree(size, case):
    ((want, gradients),) = processes(1, trained, Case(attention="default", **case))
    for loss, found in processes(size, trained, Case(**case)):
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, gradients, rtol=2e-5, atol=2e-6)


def refused(rank, size):
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import (
        MultimodalRotaryEmbedding,
        RotaryEmbedding,
    )
    from megatron.core.packed_seq_params import PackedSeqParams

    class TwoTables(RotaryEmbedding):
        def forward(self, *args, **options):
            return super().forward(*args, **options), None

    class Halved(RotaryEmbedding):
        def get_emb(self, *args, **options):
            return super().get_emb(*args, **options) / 2

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    tree = fold(*rollouts()).batch[TREE]
    n = int(tree.view(2, -1)[1].sum())
    cases = {
        "other attention": (Case(attention="default"), n),
        "latent": (Case(fields=MLA), n),
        "several documents": (Case(), n - 1),
        "served": (Case(), n),
    }
    found = {name: entered(build(case), params_of(tokens), tree) for name, (case, tokens) in cases.items()}
    model = build(Case())
    for name, params in {"no packed sequence": None, "no cu_seqlens": PackedSeqParams("thd")}.items():
        found[name] = entered(model, params, tree)
    for name, other in {"a child first": [1, -1, 3, 3], "no pairs": [-1, 2, 3], "numbers": [-1.0, n]}.items():
        found[name] = entered(model, params_of(n), torch.tensor(other))
    recurrence, mixer = nn.Module(), nn.Module()
    recurrence.self_attention, mixer.mixer = nn.Linear(2, 2), nn.Linear(2, 2)
    others = {"recurrence": recurrence, "mixer": mixer, "convolution": nn.Conv1d(1, 1, 1)}
    for name, other in {**others, "mrope": MultimodalRotaryEmbedding(8, 1.0)}.items():
        found[name] = entered([model, other], params_of(n), tree)
    found["chunks"] = entered([model, build(Case())], params_of(n), tree)
    how = {"kv_channels": 16, "rotary_percent": 1.0, "use_cpu_initialization": True}
    found["several tables"] = entered(TwoTables(**how), params_of(n), tree)
    halved = Halved(**how)
    with in_tree(halved, params_of(n), tree):
        table = halved(n, packed_seq=True)
    torch.testing.assert_close(table, halved(n)[depths(tree)], rtol=0, atol=0)
    return found


def entered(model, params, tree):
    try:
        with in_tree(model, params, tree):
            return "served"
    except ValueError as error:
        return str(error)


@needs_019
def test_models_that_do_not_know_branches_are_refused_in_one_line():
    (found,) = processes(1, refused)
    core = "decoder.layers.0.self_attention.core_attention"
    assert found["other attention"] == f"{core} (DotProductAttention) does not know the branches of a tree"
    assert "does not know the branches of a tree" in found["latent"] and "\n" not in found["latent"]
    assert found["several documents"] == "cu_seqlens_q must be of the whole row, [0, 59], got [0, 58]"
    assert found["served"] == found["chunks"] == "served"
    for name in ("no packed sequence", "no cu_seqlens"):
        assert found[name] == "cu_seqlens_q must be of the whole row, [0, 59], got None"
    assert found["a child first"].startswith("the parent of node 0 must be")
    assert found["no pairs"] == "a tree has one dim, parents and then lengths, got (3,)"
    assert found["numbers"] == "a tree must be integers, got torch.float32"
    for name, module in {
        "recurrence": "1.self_attention (Linear)",
        "mixer": "1.mixer (Linear)",
        "convolution": "1 (Conv1d)",
        "mrope": "1 (MultimodalRotaryEmbedding)",
        "several tables": " (TwoTables)",
    }.items():
        assert found[name] == f"{module} does not know the branches of a tree"
