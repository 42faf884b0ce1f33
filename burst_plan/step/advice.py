"""Settings for a predicted plan, ready to paste: flags of Megatron, or DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from burst_mcore.mask.terms import Documents, Window
from burst_plan.step.figures import PredictedStep
from burst_plan.step.plan import NOT_EXPRESSIBLE
from burst_plan.words import mask_of


def advice(step: PredictedStep) -> str:
    """Return Megatron's flags or DeepSpeed's JSON for a plan, ready to paste."""
    if step.plan.framework == "megatron":
        return " \\\n  ".join(megatron_flags(step))
    return json.dumps(deepspeed_config(step), indent=1)


def megatron_flags(step: PredictedStep) -> list[str]:
    """Return flags for a training script under the launcher, each with its value."""
    plan, attention, seq = step.plan, step.attention, sharded(step)
    flags = [
        f"--tensor-model-parallel-size {plan.tp}",
        f"--pipeline-model-parallel-size {plan.pp}",
        f"--context-parallel-size {plan.cp}",
        f"--seq-length {seq}",
        f"--max-position-embeddings {seq}",
        "--micro-batch-size 1",
        f"--global-batch-size {plan.dp * plan.micro}",
        "--bf16",
        "--use-distributed-optimizer",
        "--attention-dropout 0",
    ]
    flags += ["--sequence-parallel"] * (plan.tp > 1)
    if plan.ep > 1:
        flags += [f"--expert-model-parallel-size {plan.ep}", "--moe-token-dispatcher-type alltoall"]
    window, documents, _ = _mask(step)
    flags += [f"--window-size {window},0"] * (window is not None)
    flags += ["--dataloader-inter-document-masking"] * documents
    if plan.chunks > 1:
        layers = step.model.layers // plan.pp // plan.chunks
        flags.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if plan.offload_optimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if plan.cp > 1 or plan.recompute in ("attention", "segment") or step.mask != "causal":
        flags += [
            "--context-parallel-attention-backend burst",
            f"--burst-layout {attention.layout}",
            f"--burst-ring {attention.ring}",
            f"--burst-backward {attention.direction}",
            f"--burst-head-parallel {attention.head_parallel}",
            f"--burst-head-placement {attention.head_placement}",
        ]
    if plan.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if plan.recompute in ("attention", "segment"):
        flags.append(f"--burst-recompute {plan.recompute}")
    if plan.recompute == "segment":
        flags.append(f"--burst-recompute-keep {plan.keep:g}")
    flags += ["--burst-recompute-offload"] * plan.offload_activations
    return flags + ["--burst-fused-loss"] * plan.fused_loss


def deepspeed_config(step: PredictedStep) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with the section of this package."""
    plan, attention = step.plan, step.attention
    section: dict[str, Any] = {
        "layout": attention.layout,
        "ring": attention.ring,
        "backward": attention.direction,
        "head_parallel": attention.head_parallel,
        "head_placement": attention.head_placement,
        "fused_loss": plan.fused_loss,
        "checkpointing": {"policy": plan.recompute},
    }
    if plan.recompute == "segment":
        section["checkpointing"]["keep"] = plan.keep
    if plan.offload_activations:
        section["checkpointing"]["offload"] = True
    zero: dict[str, Any] = {"stage": plan.zero}
    if plan.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": plan.micro,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "sequence_parallel_size": plan.cp,
        "burst_attention": section,
    }


def sharded(step: PredictedStep) -> int:
    """Return a sequence's tokens, rounded up so that CP and TP ranks share it evenly, as Megatron needs."""
    shares = 2 * step.plan.cp * step.plan.tp if step.plan.cp * step.plan.tp > 1 else 1
    return -(-step.seq // shares) * shares


def notes(step: PredictedStep) -> list[str]:
    """Return the needs of a plan beyond the pasted settings, a sentence each."""
    megatron = step.plan.framework == "megatron"
    window, documents, expressible = _mask(step)
    lines = []
    if megatron and sharded(step) != step.seq:
        lines.append(f"--seq-length {sharded(step)} is {step.seq} rounded up, so that ranks share it evenly")
    if not expressible:
        asks = "a flag" if megatron else "a section of DeepSpeed's JSON"
        lines.append(f"mask {step.mask} is not expressible by {asks}: pass it to burst_attention in a layer")
    lines += of_windows(step)
    if not megatron and window is not None and step.mask != step.model.mask(step.seq):
        lines.append(f"the window is the model's: config.json must have sliding_window {window + 1}")
    if documents:
        lines.append(
            "documents are those of the packed data"
            if megatron
            else "documents are those of the batches: position_ids that restart at 0, or cu_seqlens"
        )
    if not megatron and step.model.experts:
        lines.append(f"all experts are on every rank, sharded by ZeRO alone; EP is {NOT_EXPRESSIBLE}")
    return lines


def of_windows(step: PredictedStep) -> list[str]:
    """Return a note on the model's window layers against the predicted mask."""
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
    """Return a mask by frameworks' settings: (tokens back of a window, documents, whether that is all)."""
    mask = mask_of(step.mask, step.seq)
    match [term for term in mask.terms if not isinstance(term, Documents)]:
        case [Window(left=left, right=0)]:
            return left, mask.document_ends is not None, True
    return None, False, False
