"""Losses and gradients with the fused loss equal those of Megatron's own, on every path that makes losses."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from cells import crossed
from models import BATCH, MTP, VERSION, VOCAB, Case, N, assert_equal, build, default, needs_019, step
from ranks import processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from burst_mcore.megatron import cpu
from burst_mcore.megatron.fused_loss import UnmadeLogits, fuse_loss

SLOW = pytest.mark.slow
MUP = (("use_mup", True), ("mup_base_hidden_size", 32))


@pytest.mark.proves("fused loss", "GPT at CP 2, TP 2 x CP 2; tied embeddings")
@pytest.mark.parametrize(
    ("cp", "tp", "tied"),
    [
        *((1, 1, True), (2, 1, False), (2, 2, True)),
        *(pytest.param(*cell, marks=SLOW) for cell in ((1, 1, False), (2, 1, True), (2, 2, False))),
    ],
)
def test_gpt(cp, tp, tied):
    assert_equal(step(Case(tp=tp, cp=cp, fused=True, tied=tied)), default(tied=tied))


@pytest.mark.proves("fused loss", "several microbatches in flight")
def test_microbatches_in_flight():
    assert_equal(step(Case(cp=2, fused=True, microbatches=3, recompute="full")), default(microbatches=3))


@pytest.mark.proves("fused loss", "multi-token prediction, TP 2 x CP 2")
@needs_019
@pytest.mark.parametrize(
    ("tp", "cp"), [(1, 1), (2, 2), *(pytest.param(*cell, marks=SLOW) for cell in ((2, 1), (1, 2)))]
)
def test_multi_token_prediction(tp, cp):
    sharded = (("sequence_parallel", tp > 1),)
    got = step(Case(model="mtp", tp=tp, cp=cp, fused=True, fields=MTP + sharded))
    assert_equal(got, default(model="mtp", fields=MTP))


@pytest.mark.proves("fused loss", "HybridModel at TP 2 x CP 2")
@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel is there from 0.19 on")
@pytest.mark.parametrize("tied", [pytest.param(False, marks=SLOW), True])
def test_hybrid(tied):
    got = step(Case(model="hybrid", tp=2, cp=2, fused=True, tied=tied))
    assert_equal(got, default(model="hybrid", tied=tied))


@needs_019
def test_logits_that_are_scaled():
    assert_equal(step(Case(cp=2, fused=True, fields=MUP)), default(fields=MUP))


@pytest.mark.proves("fused loss", "TP 2 x CP 2 with sequence parallelism")
@pytest.mark.parametrize("tied", [pytest.param(False, marks=SLOW), True])
def test_sequence_parallel(tied):
    case = Case(tp=2, cp=2, fused=True, tied=tied, fields=(("sequence_parallel", True),))
    assert_equal(step(case), default(tied=tied))


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
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
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
    ours, theirs = (processes(2, trained, fused, tied, distributed, torch.float32) for fused in (True, False))
    for rank in range(2):
        assert ours[rank][3] == theirs[rank][3]  # three products a token of the head, as without fusion
        for name, gradient in theirs[rank][0].items():
            torch.testing.assert_close(ours[rank][0][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=SLOW), True])
def test_main_grad_where_the_layers_add_to_it_by_apex(tied):
    """The fused head keeps the contract of the layers: it adds once, says so, and hands autograd nothing."""
    ours, layers, plain = (
        processes(2, trained, *how)
        for how in (
            (True, tied, True, torch.float32, True),
            (False, tied, True, torch.float32, True),
            (False, tied, True, torch.float32),
        )
    )
    for rank in range(2):
        for name, gradient in plain[rank][0].items():
            for got in (ours, layers):
                torch.testing.assert_close(got[rank][0][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_no_logits_and_bfloat16():
    (grads, rows, losses, _), *_ = processes(2, trained, True, False, True, torch.bfloat16)
    (want, rows_of_megatron, want_losses, _), *_ = processes(2, trained, False, False, True, torch.bfloat16)
    assert rows <= BATCH * N // 2 < rows_of_megatron
    torch.testing.assert_close(losses, want_losses, rtol=1e-2, atol=1e-2)
    for name, gradient in want.items():
        assert (grads[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


def unlabelled(rank, size, kind, fields):
    """The logits of a model without labels, before its loss is fused and after."""
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build(Case(model=kind, fields=fields)).eval()
    tokens, at = torch.randint(0, VOCAB, (BATCH, N)), torch.arange(N).expand(BATCH, N)
    with torch.no_grad():
        before = model(tokens, at, None)
        fuse_loss(model)
        return before, model(tokens, at, None)


@needs_019
@pytest.mark.parametrize(("kind", "fields"), [("hybrid", ()), ("mtp", MTP)])
def test_logits_come_back_where_there_are_no_labels(kind, fields):
    ((before, after),) = processes(1, unlabelled, kind, fields)
    assert before.shape == (BATCH, N, VOCAB)
    assert torch.equal(before, after)


def refused(rank, size, fields):
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build(Case())
    for name, value in fields.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError) as caught:
        fuse_loss(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("cross_entropy_loss_fusion", "--cross-entropy-loss-fusion: both replace the loss"),
        ("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute"),
        ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm"),
    ],
)
def test_what_it_does_not_go_with_is_named(field, words):
    (message,) = processes(1, refused, {field: True})
    assert words in message


def test_deferred_logits_are_no_logits():
    with pytest.raises(AttributeError, match="the fused loss makes no logits.*'shape'"):
        _ = UnmadeLogits(torch.ones(1), None).shape


def _negative_labels(rank, size):
    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    model = build(Case())
    tokens, at = torch.randint(0, VOCAB, (BATCH, N + 1)), torch.arange(N).expand(BATCH, N)
    labels, mask = tokens[:, 1:].clone(), torch.ones(BATCH, N)
    labels[:, :9], mask[:, :9] = -100, 0
    found = []
    for fused in (False, True):
        if fused:
            fuse_loss(model)
        model.zero_grad()
        loss = (model(tokens[:, :-1], at, None, labels=labels, loss_mask=mask) * mask).sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return found


def test_labels_that_datasets_ignore():
    ((plain, fused),) = processes(1, _negative_labels)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
