"""Small models on engines, and the single process that they are held to."""

from __future__ import annotations

import os
import tempfile

import deepspeed.module_inject.auto_ep_layer  # here once, with what they import, for ranks that are forked
import deepspeed.ops.op_builder.all_ops
import deepspeed.runtime.sequence_parallel.ulysses_sp
import deepspeed.runtime.zero.muon.muon_optimizer
import setuptools  # noqa: F401
import torch
import torch.distributed as dist
from causal_lms import TINY, VOCABULARY, dataset, model_of, plain_loss, worst

import burst_mcore.deepspeed as burst

__all__ = ["TINY", "VOCABULARY", "dataset", "model_of", "plain_loss", "worst"]

SMALL = {"reduce_bucket_size": 20000, "allgather_bucket_size": 20000, "stage3_prefetch_bucket_size": 20000}
"""Buffers of DeepSpeed's default sizes take gigabytes, and seconds."""


def config_of(stage, sp, *, gas=1, micro=1, clip=0.0, zero=None, **section):
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "sequence_parallel_size": sp,
        # Plain SGD: its first step shows what clipping did, which Adam's hides.
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **SMALL, **(zero or {})},
        "steps_per_print": 10**9,
        "burst_attention": section,
    }


def plain(samples, clip=0.0, loss_of=plain_loss, **kind):
    """(losses, gradients, norm, parameters after a step) of one process, `samples` averaged."""
    model = model_of(**kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [loss_of(model, sample) for sample in samples]
    torch.stack(losses).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return [x.item() for x in losses], gradients, norm, {k: p.detach() for k, p in model.named_parameters()}


def quiet():
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
    os.environ.update(
        LOCAL_RANK=os.environ["RANK"],
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"],
        MASTER_ADDR="127.0.0.1",  # asked for, not used: the process group is there
        MASTER_PORT="29500",
    )
    deepspeed.utils.logger.setLevel("ERROR")


def start(config, data=None, model=None, **kind):
    """(engine, loader) over all ranks; samples in order."""
    quiet()
    model = model_of(**kind) if model is None else model
    engine, _, loader, _ = burst.initialize(model=model, config=config, training_data=data)
    return engine, loader


def in_order(data, sp, micro=1):
    """A loader that shards samples over data-parallel ranks in order."""
    dp, rank = dist.get_world_size() // sp, dist.get_rank() // sp
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=dp, rank=rank, shuffle=False)
    from burst_mcore.transformers.data.batches import collated

    return torch.utils.data.DataLoader(data, batch_size=micro, sampler=sampler, collate_fn=collated)


def models_loss(engine, batch):
    return engine(**batch).loss


def trained(engine, loader, gas, loss_of=models_loss):
    """(losses, gradients, norm, parameters) of a step."""
    losses = []
    for _, batch in zip(range(gas), loader, strict=False):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        losses.append(loss.item())
        if engine.is_gradient_accumulation_boundary():
            get = deepspeed.utils.safe_get_full_grad
            gradients = {name: get(p).clone() for name, p in engine.module.named_parameters()}
        engine.step()
    norm = engine.get_global_grad_norm()
    parameters = {
        name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()
    }
    if any(p is None for p in parameters.values()):
        parameters = {name: p.detach() for name, p in engine.module.named_parameters()}
    return losses, gradients, None if norm is None else float(norm), parameters
