"""Packed documents and windows equal each document alone with Megatron's own attention on one rank."""

import sys
from itertools import accumulate
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from cells import crossed
from models import (
    MLA,
    MOE,
    MTP,
    VERSION,
    Case,
    N,
    assert_equal,
    build,
    default,
    needs_019,
    packed_seq_params,
    step,
)
from models import transformer_config as transformer_config_of
from ranks import processes

from burst_mcore import Layout, positions, shard, unshard
from burst_mcore.megatron import cpu

WHOLE = {"documents": (16, 8, 40)}
"""Multiples of 8: two chunks for each of four ranks."""
PADDED = {"documents": (13, 1, 33), "slots": (16, 8, 40)}
DOCUMENTS = {"whole": WHOLE, "padded": PADDED}
QUICK = {("whole", 1, "query"), ("padded", 1, "kv"), ("whole", 4, "kv"), ("padded", 4, "query")}
WINDOW = (("window_size", (5, 0)), ("window_attn_skip_freq", 2))


@pytest.mark.proves("packed documents, padded or not", "CP 1, 2, 4; compared with each document alone")
@pytest.mark.parametrize(
    ("packed", "cp", "backward"),
    crossed(
        DOCUMENTS,
        (1, 2, 4),
        ("query", "kv"),
        quick=lambda packed, cp, backward: (packed, cp, backward) in QUICK,
    ),
)
def test_packed_documents(packed, cp, backward):
    documents = DOCUMENTS[packed]
    assert_equal(step(Case(cp=cp, backward=backward, **documents)), default(**documents))


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


@pytest.mark.proves("packed documents, padded or not", "multi-token prediction at CP 1 and 2")
@pytest.mark.parametrize(("packed", "cp"), [("whole", 2), ("padded", 1), ("padded", 2)])
def test_multi_token_prediction_over_packed_documents(packed, cp):
    want = default(model="mtp", fields=MTP, **DOCUMENTS[packed])
    assert_equal(step(Case(model="mtp", cp=cp, fields=MTP, **DOCUMENTS[packed])), want)


SKIPPING = {
    "every layer": (),
    "every second": (("window_attn_skip_freq", 2),),
    "a list": (("window_attn_skip_freq", [0, 1]),),
}


@pytest.mark.proves("windows in all or some layers", "CP 1 and 4")
@pytest.mark.parametrize(
    ("cp", "skipping"),
    crossed(
        (1, 4), SKIPPING, quick=lambda cp, skipping: cp == {"every layer": 1, "every second": 4}.get(skipping)
    ),
)
def test_windows(cp, skipping):
    fields = (("window_size", (9, 0)), *SKIPPING[skipping])
    got, want = step(Case(cp=cp, fields=fields)), step(Case(attention="default", fields=fields))
    assert_equal(got, want)
    assert not torch.allclose(got.losses, default().losses, rtol=1e-3)


@pytest.mark.proves("windows in all or some layers", "packed documents at CP 1, 2, 4")
@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_windows_over_packed_documents(cp):
    assert_equal(step(Case(cp=cp, fields=WINDOW, **PADDED)), default(fields=WINDOW, **PADDED))


def test_a_window_that_is_not_shorter_than_the_sequence():
    assert_equal(step(Case(cp=2, fields=(("window_size", (N, 0)),))), default())


def _with_groups_of_calls(rank, size, kind, heads):
    """Four ranks without context parallelism, call by call: a pair and two alone; all four; each alone."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
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


def _sharded_documents(rank, size):
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
def test_documents_of_a_batch_are_sharded_where_transformer_engine_is_missing():
    processes(2, _sharded_documents)


def _as_on_branch_dev(rank, size):
    """Put what branch dev asks of TransformerEngine and of devices where that branch has it, by name."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    def needs_transformer_engine(*args):
        raise ImportError("transformer_engine_torch")

    def gathers(config):
        given = config.cp_comm_type
        words = given if isinstance(given, list) else [given or "all_gather"]
        if config.transformer_impl == "local" and any(word != "all_gather" for word in words):
            raise ValueError("fallback_to_eager_attn only supports all_gather communication type")
        post_init(config)

    post_init, TransformerConfig.__post_init__ = TransformerConfig.__post_init__, gathers
    DotProductAttention.__init__ = lambda self, config, cp_comm_type=None: None
    schedules = ModuleType("megatron.core.datasets.data_schedule_utils")
    sys.modules[schedules.__name__] = schedules
    for module in (transformer_engine, schedules):
        module.get_thd_partitioned_indices = needs_transformer_engine
    cpu.enable()

    ends, layout = (
        torch.tensor([0, 8, 20], dtype=torch.int32),
        Layout("zigzag-documents", ends=(0, 8, 20, 24)),
    )
    for module in (transformer_engine, schedules):
        mine = module.get_thd_partitioned_indices(ends, 24, size, rank)
        assert torch.equal(mine, positions(24, rank=rank, size=size, layout=layout))

    assert transformer_config.is_te_min_version("2.9.0")
    assert not transformer_config.is_te_min_version("2.8.0")
    assert not transformer_config.is_te_min_version("2.10.0")

    parallel_state.initialize_model_parallel(context_parallel_size=size)
    group = parallel_state.get_context_parallel_group()
    dist.barrier(group=group, device_ids=[torch.cuda.current_device()])

    for kind in ("p2p", ["p2p", "a2a"], "all_gather", None):
        config = transformer_config_of(Case(cp=size, fields=(("cp_comm_type", kind),)))
        assert config.cp_comm_type == kind
    with pytest.raises(AssertionError, match="Length of cp_comm_type .3."):
        transformer_config_of(Case(cp=size, fields=(("cp_comm_type", ["p2p"] * 3),)))
    DotProductAttention(config, cp_comm_type="all_gather")
    with pytest.raises(ValueError, match="local attention has --cp-comm-type all_gather, not p2p"):
        DotProductAttention(config, cp_comm_type="p2p")


@needs_019
def test_a_cpu_stands_in_for_what_branch_dev_asks_of_a_gpu():
    processes(2, _as_on_branch_dev)
