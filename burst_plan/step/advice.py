"""What to paste to run a predicted way: flags of Megatron, or DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from burst_mcore.mask.terms import Documents, Window
from burst_plan.step.figures import PredictedStep
from burst_plan.step.way import NOT_EXPRESSIBLE
from burst_plan.words import mask_of


def advice(step: PredictedStep) -> str:
    """Return Megatron's flags or DeepSpeed's JSON of a way, ready to paste."""
    if step.way.framework == "megatron":
        return " \\\n  ".join(megatron_flags(step))
    return json.dumps(deepspeed_config(step), indent=1)


def megatron_flags(step: PredictedStep) -> list[str]:
    """Return flags for a training script under the launcher, a flag with its value in each."""
    way, attention, seq = step.way, step.attention, sharded(step)
    flags = [
        f"--tensor-model-parallel-size {way.tp}",
        f"--pipeline-model-parallel-size {way.pp}",
        f"--context-parallel-size {way.cp}",
        f"--seq-length {seq}",
        f"--max-position-embeddings {seq}",
        "--micro-batch-size 1",
        f"--global-batch-size {way.dp * way.micro}",
        "--bf16",
        "--use-distributed-optimizer",
        "--attention-dropout 0",
    ]
    flags += ["--sequence-parallel"] * (way.tp > 1)
    if way.ep > 1:
        flags += [f"--expert-model-parallel-size {way.ep}", "--moe-token-dispatcher-type alltoall"]
    left, documents, _ = _mask(step)
    flags += [f"--window-size {left},0"] * (left is not None)
    flags += ["--dataloader-inter-document-masking"] * documents
    if way.chunks > 1:
        layers = step.model.layers // way.pp // way.chunks
        flags.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if way.offload_optimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if way.cp > 1 or way.recompute in ("attention", "segment") or step.mask != "causal":
        flags += [
            "--context-parallel-attention-backend burst",
            f"--burst-layout {attention.layout}",
            f"--burst-ring {attention.ring}",
            f"--burst-backward {attention.direction}",
            f"--burst-head-parallel {attention.head_parallel}",
            f"--burst-head-placement {attention.head_placement}",
        ]
    if way.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if way.recompute in ("attention", "segment"):
        flags.append(f"--burst-recompute {way.recompute}")
    if way.recompute == "segment":
        flags.append(f"--burst-recompute-keep {way.keep:g}")
    flags += ["--burst-recompute-offload"] * way.offload_activations
    return flags + ["--burst-fused-loss"] * way.fused_loss


def deepspeed_config(step: PredictedStep) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with the section of this package."""
    way, attention = step.way, step.attention
    section: dict[str, Any] = {
        "layout": attention.layout,
        "ring": attention.ring,
        "backward": attention.direction,
        "head_parallel": attention.head_parallel,
        "head_placement": attention.head_placement,
        "fused_loss": way.fused_loss,
        "checkpointing": {"policy": way.recompute},
    }
    if way.recompute == "segment":
        section["checkpointing"]["keep"] = way.keep
    if way.offload_activations:
        section["checkpointing"]["offload"] = True
    zero: dict[str, Any] = {"stage": way.zero}
    if way.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": way.micro,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "sequence_parallel_size": way.cp,
        "burst_attention": section,
    }


def sharded(step: PredictedStep) -> int:
    """Return the tokens that ranks of CP and TP share evenly: Megatron takes no others."""
    shares = 2 * step.way.cp * step.way.tp if step.way.cp * step.way.tp > 1 else 1
    return -(-step.seq // shares) * shares


def notes(step: PredictedStep) -> list[str]:
    """Return what a way needs besides that which is pasted, a sentence each."""
    megatron = step.way.framework == "megatron"
    left, documents, expressible = _mask(step)
    told = []
    if megatron and sharded(step) != step.seq:
        told.append(f"--seq-length {sharded(step)} is {step.seq} rounded up, so that ranks share it evenly")
    if not expressible:
        asks = "a flag" if megatron else "a section of DeepSpeed's JSON"
        told.append(f"mask {step.mask} is not expressible by {asks}: pass it to burst_attention in a layer")
    told += of_windows(step)
    if not megatron and left is not None and step.mask != step.model.mask(step.seq):
        told.append(f"the window is the model's: config.json must have sliding_window {left + 1}")
    if documents:
        told.append(
            "documents are those of the packed data"
            if megatron
            else "documents are those of the batches: position_ids that restart at 0, or cu_seqlens"
        )
    if not megatron and step.model.experts:
        told.append(f"all experts are on every rank, sharded by ZeRO alone; EP is {NOT_EXPRESSIBLE}")
    return told


def of_windows(step: PredictedStep) -> list[str]:
    """Return what the model's own windows have to do with the mask that was predicted."""
    model = step.model
    if not model.windowed or model.window >= step.seq:
        return []
    if model.windowed < model.attending:
        return [
            f"{model.windowed} of {model.attending} layers have a window of {model.window} tokens: all "
            f"layers are predicted with mask {step.mask}"
        ]
    if "window" in step.mask or step.mask == model.mask(step.seq):
        return []
    return [f"config.json asks for sliding_window {model.window}: mask {step.mask} was predicted instead"]


def _mask(step: PredictedStep) -> tuple[int | None, bool, bool]:
    """Return a mask as frameworks ask for it: (tokens back of a window, documents, whether that is all)."""
    mask = mask_of(step.mask, step.seq)
    match [term for term in mask.terms if not isinstance(term, Documents)]:
        case [Window(left=left, right=0)]:
            return left, mask.document_ends is not None, True
    return None, False, False
