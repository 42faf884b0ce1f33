"""Packed documents and windows equal each document alone with Megatron's own attention on one rank."""

import pytest
import torch
import torch.distributed as dist
from models import (
    MLA,
    MOE,
    VERSION,
    Case,
    N,
    assert_equal,
    build,
    default,
    needs_019,
    on_this_cp_rank,
    step,
)
from ranks import processes

from burst_mcore import Layout, positions, unshard
from burst_mcore.megatron import cpu

WHOLE = {"documents": (16, 8, 40)}
"""Multiples of 8: two chunks for each of four ranks."""
PADDED = {"documents": (13, 1, 33), "slots": (16, 8, 40)}
WINDOW = (("window_size", (5, 0)), ("window_attn_skip_freq", 2))


@pytest.mark.proves("packed documents, padded or not", "CP 1, 2, 4; beside each document alone")
@pytest.mark.parametrize("backward", ["query", "kv"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("packed", [WHOLE, PADDED], ids=["whole", "padded"])
def test_packed_documents(packed, cp, backward):
    assert_equal(step(Case(cp=cp, backward=backward, **packed)), default(**packed))


WAYS = {
    "tensor parallel": {"tp": 2, "cp": 2},
    "shared heads on a double ring": {"cp": 4, "hierarchy": (2, 2), "burst": (("head_parallel", 2),)},
    "no ring": {"cp": 4, "burst": (("ring", "direct"),)},
    "recompute": {"cp": 2, "recompute": "full", "microbatches": 2},
}


@pytest.mark.proves("packed documents, padded or not", "TP 2 x CP 2; CP 4 with shared heads; full recompute")
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_on_other_ways(way):
    want = default(**PADDED, microbatches=WAYS[way].get("microbatches", 1))
    assert_equal(step(Case(**WAYS[way], **PADDED)), want)


@pytest.mark.proves("packed documents, padded or not", "MLA, HybridModel, MoE at CP 2")
@needs_019
def test_packed_documents_in_other_models():
    # Megatron's local attention does not build in an MLA layer: the baseline is ours on one rank.
    mla = step(Case(fields=MLA, **PADDED))
    assert_equal(step(Case(cp=2, fields=MLA, **PADDED)), mla)
    latent = step(Case(cp=2, fields=MLA, mla_latent="on", **PADDED))
    assert latent.latents == 2
    assert_equal(latent, mla)
    for model, fields in (("hybrid", ()), ("moe", MOE)):
        want = default(model=model, fields=fields, **PADDED)
        assert_equal(step(Case(model=model, cp=2, fields=fields, **PADDED)), want)


SKIPPING = {
    "every layer": (),
    "every second": (("window_attn_skip_freq", 2),),
    "a list": (("window_attn_skip_freq", [0, 1]),),
}


@pytest.mark.proves("windows in all or some layers", "CP 1 and 4")
@pytest.mark.parametrize("skipping", SKIPPING)
@pytest.mark.parametrize("cp", [1, 4])
def test_windows(cp, skipping):
    fields = (("window_size", (9, 0)), *SKIPPING[skipping])
    got, want = step(Case(cp=cp, fields=fields)), step(Case(attention="default", fields=fields))
    assert_equal(got, want)
    assert not torch.allclose(got.losses, default().losses, rtol=1e-3)


@pytest.mark.proves("windows in all or some layers", "packed documents at CP 1, 2, 4")
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_windows_over_packed_documents(cp):
    assert_equal(step(Case(cp=cp, fields=WINDOW, **PADDED)), default(fields=WINDOW, **PADDED))


def test_a_window_that_is_not_shorter_than_the_sequence():
    assert_equal(step(Case(cp=2, fields=(("window_size", (N, 0)),))), default())


def _with_groups_of_calls(rank, size):
    """Four ranks without context parallelism: two share a sequence, and each of the others has one alone."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.packed_seq_params import PackedSeqParams

    parallel_state.initialize_model_parallel(context_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = build(Case(fields=(("hybrid_context_parallel", True),) if VERSION >= (0, 19) else ()))
    pair = dist.new_group([0, 1])
    group = pair if rank < 2 else None
    at = torch.arange(N)[None]
    t = torch.randint(0, 96, (1, N + 1), generator=torch.Generator().manual_seed(3))
    batch = {"tokens": t[:, :-1], "labels": t[:, 1:], "position_ids": at}
    if group is not None:
        batch = on_this_cp_rank(batch, group)
    ends = torch.tensor([0, N], dtype=torch.int32)
    params = PackedSeqParams("sbhd", ends, ends, ends, ends, N, N, 2 if group else 1, group)
    tokens, labels, where = batch["tokens"], batch["labels"], batch["position_ids"]
    loss = model(tokens, where, None, labels=labels, packed_seq_params=params)
    (loss.sum() / N).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if group is None:
        return loss.detach(), gradient
    dist.all_reduce(gradient, group=group)
    parts = [torch.empty_like(loss) for _ in range(2)]
    dist.all_gather(parts, loss.detach(), group=group)
    return unshard(parts, 1), gradient


@pytest.mark.proves("hybrid context parallelism: a group for each call", "two pairs of ranks")
def test_each_call_may_bring_its_own_group():
    found = processes(4, _with_groups_of_calls)
    for loss, gradient in found:
        torch.testing.assert_close(loss, found[2][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, found[2][1], rtol=1e-4, atol=1e-7)


def _dealt_documents(rank, size):
    cpu.enable()
    from megatron.core import utils

    tokens = torch.arange(24)[None]
    batch = {"tokens": tokens, "labels": tokens + 1, "loss_mask": None, "position_ids": tokens}
    batch |= {"cu_seqlens": torch.tensor([[0, 8, 20]], dtype=torch.int32), "cu_seqlens_padded": None}
    utils._get_batch_on_this_cp_rank_per_document_balancing(batch, dist.group.WORLD)
    layout = Layout("zigzag-documents", ends=(0, 8, 20, 24))
    assert batch["tokens"][0].tolist() == positions(24, rank=rank, size=size, layout=layout).tolist()
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert batch["tokens"][0, :4].tolist() == ([0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5])


@needs_019
def test_documents_of_a_batch_are_dealt_where_transformer_engine_is_missing():
    processes(2, _dealt_documents)
