"""Losses and gradients with the fused loss equal those of Megatron's own, on every path that makes losses."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from cells import crossed
from models import BATCH, MTP, VOCAB, Case, N, build, needs_019, start_megatron
from ranks import on_ranks, processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from burst_mcore.megatron.fused_loss import UnmadeLogits, fuse_loss

SLOW = pytest.mark.slow


def accumulate_by_a_stand_in():
    """Give Megatron's layers apex's extension, as its binding is called; return how often it was."""
    from megatron.core.tensor_parallel import layers

    calls = []

    def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad):
        assert total_input.shape[0] == grad_output.shape[0] and main_grad.dtype == torch.float32
        calls.append(main_grad.shape)
        main_grad += grad_output.float().t() @ total_input.float()

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    layers._grad_accum_fusion_available = True
    return calls


def trained(rank, size, fused, tied, distributed, dtype, accumulated=False):
    """main_grads of all parameters after two microbatches under DistributedDataParallel, by name.

    Also how many rows of logits the largest tensor had, the losses, and FLOPs.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    start_megatron(tensor_model_parallel_size=1)
    calls = accumulate_by_a_stand_in() if accumulated else []
    fields = ("params_dtype", dtype), ("bf16", dtype == torch.bfloat16)
    fields += (("gradient_accumulation_fusion", accumulated),)
    model = build(Case(tied=tied, fields=fields)).to(dtype)
    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=distributed
    )
    if fused:
        fuse_loss(model)
        fuse_loss(model)
    ddp = DistributedDataParallel(model.config, how, model)
    ddp.zero_grad_buffer()
    at = torch.arange(N).expand(BATCH, N)
    make = torch.Generator().manual_seed(rank)
    head = model.embedding.word_embeddings.weight if tied else model.output_layer.weight
    largest, flops, losses = 0, 0, []
    for last in (False, True):
        tokens = torch.randint(0, VOCAB, (BATCH, N + 1), generator=make)
        mask = (torch.rand(BATCH, N, generator=make) > 0.3).float()
        counter = FlopCounterMode(display=False)
        with nullcontext() if last else ddp.no_sync(), Largest() as seen, counter:
            loss = ddp(tokens[:, :-1], at, None, labels=tokens[:, 1:], loss_mask=mask)
            (64 * (loss * mask).sum() / mask.sum()).backward()
        largest, flops = max(largest, seen.logits), flops + counter.get_total_flops()
        assert head.grad_added_to_main_grad == (fused or accumulated)
        assert getattr(head, "zero_out_wgrad", False) == tied and (head.grad is None or not head.grad.any())
        losses.append(loss.detach())
    assert bool(calls) == accumulated and (head.shape in calls) == (accumulated and not fused)
    ddp.finish_grad_sync()
    with torch.no_grad():
        logits = ddp(tokens[:, :-1], at, None)
    assert logits.shape == (BATCH, N, VOCAB)
    main_grads = {n: p.main_grad.clone() for n, p in model.named_parameters()}
    return main_grads, largest, torch.stack(losses), flops


class Largest(TorchDispatchMode):
    """The most rows that a tensor had with as many columns as the vocabulary."""

    logits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == VOCAB and x.is_floating_point():
                self.logits = max(self.logits, x.numel() // VOCAB)
        return found


@pytest.mark.proves("fused loss", "DDP, distributed optimizer")
@pytest.mark.parametrize(
    ("tied", "distributed"),
    crossed((False, True), (False, True), quick=lambda tied, distributed: tied != distributed),
)
def test_main_grad(tied, distributed):
    """Also where layers add to it by apex: the head adds once, says so, and hands autograd nothing."""
    how = tied, distributed, torch.float32
    theirs, ours, by_apex = (
        processes(2, trained, fused, *how, accumulated)
        for fused, accumulated in ((False, False), (True, False), (True, True))
    )
    for rank in range(2):
        assert ours[rank][3] == theirs[rank][3]  # three products a token of the head, as without fusion
        for name, gradient in theirs[rank][0].items():
            for got in (ours, by_apex):
                torch.testing.assert_close(got[rank][0][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_no_logits_and_bfloat16():
    (grads, rows, losses, _), *_ = processes(2, trained, True, False, True, torch.bfloat16)
    (want, rows_of_megatron, want_losses, _), *_ = processes(2, trained, False, False, True, torch.bfloat16)
    assert rows <= BATCH * N // 2 < rows_of_megatron
    torch.testing.assert_close(losses, want_losses, rtol=1e-2, atol=1e-2)
    for name, gradient in want.items():
        assert (grads[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


@needs_019
@pytest.mark.parametrize(("kind", "fields"), [("hybrid", ()), ("mtp", MTP)])
@on_ranks(1)
def test_logits_come_back_where_there_are_no_labels(rank, size, kind, fields):
    start_megatron()
    model = build(Case(model=kind, fields=fields)).eval()
    tokens, at = torch.randint(0, VOCAB, (BATCH, N)), torch.arange(N).expand(BATCH, N)
    with torch.no_grad():
        before = model(tokens, at, None)
        fuse_loss(model)
        assert before.shape == (BATCH, N, VOCAB) and torch.equal(before, model(tokens, at, None))


@on_ranks(1)
def test_what_it_does_not_go_with_is_named(rank, size):

    start_megatron()
    for field, words in {
        "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion: both replace the loss",
        "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
        "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    }.items():
        model = build(Case())
        setattr(model.config, field, True)
        with pytest.raises(ValueError, match=words):
            fuse_loss(model)


def test_deferred_logits_are_no_logits():
    with pytest.raises(AttributeError, match="the fused loss makes no logits.*'shape'"):
        _ = UnmadeLogits(torch.ones(1), None).shape
