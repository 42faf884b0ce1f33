"""Converts a configuration to a plan of a step: DeepSpeed's JSON, or Megatron's arguments."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment
from burst_mcore.config import BurstConfig
from burst_mcore.deepspeed.section import Checkpointing, config_dict, section_of
from burst_mcore.deepspeed.settings import part, sequence_parallel_size, zero
from burst_mcore.megatron.arguments import add_arguments, burst_config, recompute_policy, uses_burst
from burst_plan.step.memory import shard_of
from burst_plan.step.model import ArgumentParser, Model
from burst_plan.step.plan import Plan

MEGATRONS_OWN = BurstConfig(ring="flat", backward="kv")
"""Megatron's own attention over context-parallel ranks, p2p: one ring in which keys and values rotate."""


class NotPredictedError(ValueError):
    """The reason why a configuration has no predicted step."""


def of_deepspeed(
    path: Path | Mapping[str, Any], world: int, model: Model, seq: int
) -> tuple[Plan, BurstConfig]:
    """Return the plan over `world` ranks of DeepSpeed's JSON, and the settings of attention.

    Raises:
        SectionError, RefusedError: as `burst_mcore.deepspeed.initialize` would.
        NotPredictedError: the planner does not support such settings.
    """
    config = config_dict(path)
    section, settings = section_of(config), zero(config)
    cp = sequence_parallel_size(config, world)
    if part(config, "bf16").get("enabled") is not True and part(config, "fp16").get("enabled") is not True:
        raise NotPredictedError("the model of a step is one of 16 bits: enable bf16")
    homes = {name: getattr(settings, f"offload_{name}") for name in ("param", "optimizer")}
    devices = {name: str(getattr(home.device, "value", home.device)) for name, home in homes.items() if home}
    if devices.get("param", "none") != "none" or devices.get("optimizer", "none") not in ("none", "cpu"):
        raise NotPredictedError("of ZeRO's offloads only that of the optimizer to the cpu is predicted")
    steps = config.get("gradient_accumulation_steps", 1)
    plan = Plan(
        framework="deepspeed",
        cp=cp,
        dp=world // cp,
        zero=int(settings.stage),
        micro=steps if isinstance(steps, int) else 1,
        fused_loss=section.fused_loss,
        offload_optimizer=devices.get("optimizer") == "cpu",
        recompute=section.checkpointing.policy,
        keep=_kept(section.checkpointing, model, seq, cp),
        offload_activations=section.checkpointing.offload,
    )
    return plan, section.attention


def _kept(checkpointing: Checkpointing, model: Model, seq: int, cp: int) -> float:
    """Return the share of the sequence that "segment" keeps; auto: the largest that fits its memory."""
    if checkpointing.policy != "segment":
        return 1.0
    if isinstance(checkpointing.keep, float):
        return checkpointing.keep
    assert checkpointing.memory_gb is not None
    layer = shard_of(model, Plan(framework="deepspeed", cp=cp), seq).result_bytes
    return min(1.0, checkpointing.memory_gb * 1e9 / (max(1, model.attending) * layer))


def of_megatron(text: str, world: int, degrees: Mapping[str, int]) -> tuple[Plan, BurstConfig]:
    """Return the plan over `world` ranks of Megatron's arguments, and the settings of attention.

    degrees: "tp", "cp", "pp", "ep" and "batch", if given.

    Raises:
        ValueError: illegal or contradictory arguments.
        NotPredictedError: the planner does not support such settings.
    """
    a = _parsed(text)
    tp, cp, pp, ep = (degrees.get(name, 1) for name in ("tp", "cp", "pp", "ep"))
    dp, rest = divmod(world, tp * cp * pp)
    if rest:
        raise ValueError(f"TP {tp} x CP {cp} x PP {pp} do not divide {world} ranks")
    micro, rest = divmod(degrees.get("batch", dp), dp)
    if rest:
        raise ValueError(
            f"--global-batch-size {degrees['batch']} does not divide over {dp} data parallel ranks"
        )
    if a.recompute_granularity == "selective":
        raise NotPredictedError("--recompute-granularity selective is not predicted")
    if a.window_size is not None or a.dataloader_inter_document_masking:
        raise NotPredictedError("doctor predicts causal attention: for windows and documents use plan --mask")
    if a.burst_recompute and a.recompute_granularity is None:
        a.recompute_granularity = "full"  # as in the launcher
    policy = recompute_policy(a) if a.recompute_granularity else None
    rule = policy.policy if isinstance(policy, Offload) else policy
    share = rule.keep if isinstance(rule, Segment) else 1.0
    if isinstance(share, str):
        raise NotPredictedError("--burst-recompute-keep auto is not predicted: give a share")
    words = {type(None): "none", Full: "full", KeepAttention: "attention", Segment: "segment"}
    plan = Plan(
        tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, micro=micro,
        chunks=a.num_virtual_stages_per_pipeline_rank or 1,
        zero=int(a.use_distributed_optimizer),
        recompute=words[type(rule)],
        keep=share,
        offload_activations=isinstance(policy, Offload),
        offload_optimizer=a.optimizer_cpu_offload,
        fused_loss=a.burst_fused_loss,
    )  # fmt: skip
    return plan, burst_config(a) if uses_burst(a) else MEGATRONS_OWN


def _parsed(text: str) -> argparse.Namespace:
    """Return the arguments of a run that determine time and memory, without sizes and degrees."""
    parser = add_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    for flag in ("use-distributed-optimizer", "optimizer-cpu-offload", "dataloader-inter-document-masking"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--window-size")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    a = parser.parse_known_args(shlex.split(text))[0]
    if a.num_layers_per_virtual_pipeline_stage:
        stage = a.pipeline_model_parallel_size * a.num_layers_per_virtual_pipeline_stage
        a.num_virtual_stages_per_pipeline_rank = a.num_layers // max(1, stage)
    return a
