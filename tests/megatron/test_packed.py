"""Packed documents: groups that come with a call, and documents of batches without TransformerEngine."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from models import VERSION, Case, N, build, needs_019, packed_seq_params, start_megatron
from ranks import on_ranks, processes

from burst_mcore import Layout, positions, shard, unshard
from burst_mcore.megatron import cpu

PADDED = {"documents": (13, 1, 33), "slots": (16, 8, 40)}


def _with_groups_of_calls(rank, size, kind, heads):
    """Four ranks without context parallelism, call by call: a pair and two alone; all four; each alone."""

    start_megatron(context_parallel_size=1)
    # Before branch dev Megatron takes the rotary positions of thd from the model's own group.
    position = "rope" if kind == "sbhd" else "learned_absolute"
    fields = (("hybrid_context_parallel", True),) if VERSION >= (0, 19) else ()
    fields += (("mtp_num_layers", heads),) if heads else ()
    model = build(Case(model="mtp" if heads else "gpt", fields=fields, position=position))
    pair = dist.new_group([0, 1])
    return [_call(model, kind, group) for group in (pair if rank < 2 else None, dist.group.WORLD, None)]


def _call(model, kind, group):
    """Losses of the real tokens, and all gradients, of a call whose packed_seq_params bring a group."""
    case = Case(documents=(N,)) if kind == "sbhd" else Case(**PADDED)
    size, me = (group.size(), group.rank()) if group else (1, 0)
    held = case.slots or case.documents
    layout = Layout("zigzag-documents", ends=tuple(accumulate(held, initial=0)))  # of one document: zigzag
    where = torch.cat([torch.arange(n) for n in held])[None]
    real = torch.cat([torch.arange(n) < d for n, d in zip(held, case.documents, strict=True)])
    starts = torch.cat([torch.arange(n) % max(1, n // 8) == 0 for n in held])  # of chunks: see models.py
    weighed = (real & ~starts).float()[None]
    t = torch.randint(0, 96, (1, len(real) + 1), generator=torch.Generator().manual_seed(3))
    tokens, labels, where, counted, mask = (
        shard(x, 1, rank=me, size=size, layout=layout)
        for x in (t[:, :-1], t[:, 1:], where, real[None], weighed)
    )
    params = packed_seq_params(case)
    params.qkv_format, params.cp_group, params.local_cp_size = kind, group, size
    model.zero_grad()
    loss = model(tokens, where, None, labels=labels, loss_mask=mask, packed_seq_params=params) * counted
    (loss.sum() / real.sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    parts = [torch.empty_like(loss) for _ in range(size)]
    if group:
        dist.all_reduce(gradient, group=group)
        dist.all_gather(parts, loss.detach().contiguous(), group=group)
        loss = unshard(parts, 1, layout=layout)
    return loss.detach()[:, real], gradient


@pytest.mark.proves("dynamic (hybrid) CP: a group for each call", "1, 2 and 4 ranks, sbhd and thd")
@pytest.mark.parametrize(("kind", "heads"), [("sbhd", 0), ("thd", 0), ("sbhd", 1), ("thd", 1)])
def test_each_call_may_bring_its_own_group(kind, heads):
    """Also to the further heads of multi-token prediction, which shift tokens over the group."""
    found = [call for calls in processes(4, _with_groups_of_calls, kind, heads) for call in calls]
    for loss, gradient in found:
        torch.testing.assert_close(loss, found[-1][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, found[-1][1], rtol=1e-4, atol=1e-7)


@needs_019
@on_ranks(2)
def test_documents_of_a_batch_are_sharded_where_transformer_engine_is_missing(rank, size):
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
