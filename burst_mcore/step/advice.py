"""What to paste to run a predicted way: flags of Megatron, or DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from burst_mcore.step.figures import Step


def advice(step: Step) -> str:
    """Return Megatron's flags or DeepSpeed's JSON of a way, ready to paste."""
    if step.way.framework == "megatron":
        return " \\\n  ".join(megatron_flags(step))
    return json.dumps(deepspeed_config(step), indent=1)


def megatron_flags(step: Step) -> list[str]:
    """Return flags for a training script under the launcher, a flag with its value in each."""
    way, attention = step.way, step.attention
    flags = [
        f"--tensor-model-parallel-size {way.tp}",
        f"--pipeline-model-parallel-size {way.pp}",
        f"--context-parallel-size {way.cp}",
        f"--seq-length {step.seq}",
        f"--max-position-embeddings {step.seq}",
        "--micro-batch-size 1",
        f"--global-batch-size {way.dp * way.micro}",
        "--bf16",
        "--use-distributed-optimizer",
        "--attention-dropout 0",
    ]
    flags += ["--sequence-parallel"] * (way.tp > 1)
    if way.chunks > 1:
        layers = step.model.layers // way.pp // way.chunks
        flags.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if way.offload_optimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if way.cp > 1 or way.recompute in ("attention", "segment"):
        flags += [
            "--context-parallel-attention-backend burst",
            f"--burst-layout {way.layout}",
            f"--burst-ring {attention.ring}",
            f"--burst-backward {attention.direction}",
            f"--burst-head-parallel {attention.head_parallel}",
        ]
    if way.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if way.recompute in ("attention", "segment"):
        flags.append(f"--burst-recompute {way.recompute}")
    if way.recompute == "segment":
        flags.append(f"--burst-recompute-keep {way.keep:g}")
    flags += ["--burst-recompute-offload"] * way.offload_activations
    return flags + ["--burst-fused-loss"] * way.fused_loss


def deepspeed_config(step: Step) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with the section of this package."""
    way, attention = step.way, step.attention
    section: dict[str, Any] = {
        "layout": way.layout,
        "ring": attention.ring,
        "backward": attention.direction,
        "head_parallel": attention.head_parallel,
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
