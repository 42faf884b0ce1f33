"""Rollouts as a tree in a Megatron model over a ring, beside rows apart in Megatron's own attention."""

import pytest
import torch
import torch.distributed as dist
from models import MLA, VOCAB, Case, build, needs_019
from ranks import processes
from test_packed import WINDOW

from burst_mcore import shard
from burst_mcore.megatron import cpu
from burst_mcore.rollouts import fold
from burst_mcore.rollouts.columns import TREE
from burst_mcore.rollouts.megatron import in_tree
from burst_mcore.rollouts.trees import padded


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
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=2e-6), name


def refused(rank, size):
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

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
    found = {}
    for name, (case, tokens) in cases.items():
        try:
            with in_tree(build(case), params_of(tokens), tree):
                found[name] = "served"
        except ValueError as error:
            found[name] = str(error)
    return found


@needs_019
def test_models_that_do_not_know_branches_are_refused_in_one_line():
    (found,) = processes(1, refused)
    core = "decoder.layers.0.self_attention.core_attention"
    assert found["other attention"] == f"{core} (DotProductAttention) does not know the branches of a tree"
    assert "does not know the branches of a tree" in found["latent"] and "\n" not in found["latent"]
    assert found["several documents"] == "cu_seqlens_q must be of the whole row, [0, 59], got [0, 58]"
    assert found["served"] == "served"
