"""Converts a configuration to a plan of a step: DeepSpeed's JSON, or Megatron's arguments, with options."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment
from burst_mcore.config import BurstConfig
from burst_mcore.deepspeed.section import Checkpointing, section_of
from burst_mcore.deepspeed.settings import part, sequence_parallel_size, zero
from burst_mcore.megatron.arguments import add_arguments, burst_config, recompute_policy, uses_burst
from burst_mcore.rates import Rates
from burst_plan.explain.predict import MOST_RANKS
from burst_plan.machines import Machine
from burst_plan.step.memory import shard_of
from burst_plan.step.model import ArgumentParser, Model
from burst_plan.step.plan import Plan
from burst_plan.step.planned import length_of

DEFAULT_LENGTH = "128K"
MEGATRONS_OWN = BurstConfig(ring="flat", backward="kv")
"""Megatron's own attention over context-parallel ranks, p2p: one ring in which keys and values rotate."""


class NotPredictedError(ValueError):
    """The reason why a configuration has no predicted step."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command line, without configuration and model. Raises ValueError for illegal numbers."""

    seq: str | None
    world: int | None
    per_node: int | None
    machine: Machine | None
    """The machine of its GPUs; None: this machine's device."""
    rates: Rates | None

    def __post_init__(self) -> None:
        for name, value in (("--world", self.world), ("--per-node", self.per_node)):
            if value is not None and not 1 <= value <= MOST_RANKS:
                raise ValueError(f"{name} must be at least 1 and at most {MOST_RANKS}, got {value}")

    def length(self, megatrons: int | None) -> int:
        """Return the tokens of a sequence; megatrons: the --seq-length of Megatron's arguments."""
        return length_of(self.seq or (DEFAULT_LENGTH if megatrons is None else None), megatrons)

    def node(self, world: int) -> int:
        """Return the ranks of a node."""
        return self.per_node or min(world, 8)


def number(config: Mapping[str, Any], name: str) -> int:
    """Return a number in DeepSpeed's JSON: 1 if it is missing, or "auto", which the Trainer sets."""
    value = config.get(name, 1)
    return value if isinstance(value, int) else 1


def of_deepspeed(config: Mapping[str, Any], world: int, model: Model, seq: int) -> tuple[Plan, BurstConfig]:
    """Return the plan over `world` ranks of DeepSpeed's JSON, and the settings of attention.

    Raises:
        SectionError, UnsupportedError: as `burst_mcore.deepspeed.initialize` would.
        NotPredictedError: the planner does not support such settings.
    """
    section, settings = section_of(config), zero(config)
    cp = sequence_parallel_size(config, world)
    if part(config, "bf16").get("enabled") is not True and part(config, "fp16").get("enabled") is not True:
        raise NotPredictedError("the model of a step is one of 16 bits: enable bf16")
    homes = {name: getattr(settings, f"offload_{name}") for name in ("param", "optimizer")}
    devices = {name: str(getattr(home.device, "value", home.device)) for name, home in homes.items() if home}
    if devices.get("param", "none") != "none" or devices.get("optimizer", "none") not in ("none", "cpu"):
        raise NotPredictedError("of ZeRO's offloads only that of the optimizer to the cpu is predicted")
    layer = shard_of(model, Plan(framework="deepspeed", cp=cp), seq).result_bytes
    plan = Plan(
        framework="deepspeed",
        cp=cp,
        dp=world // cp,
        zero=int(settings.stage),
        micro=number(config, "gradient_accumulation_steps"),
        fused_loss=section.fused_loss,
        offload_optimizer=devices.get("optimizer") == "cpu",
        recompute=section.checkpointing.policy,
        keep=share_kept(section.checkpointing, model.attending, layer),
        offload_activations=section.checkpointing.offload,
    )
    return plan, section.attention


def share_kept(checkpointing: Checkpointing, layers: int, layer: int) -> float:
    """Return the share of the sequence that "segment" keeps; auto: the largest that fits its memory.

    layer: bytes of a whole layer of attention; layers: those with attention.
    """
    if checkpointing.policy != "segment":
        return 1.0
    if not isinstance(checkpointing.keep, str):
        return checkpointing.keep
    assert checkpointing.memory_gb is not None
    return min(1.0, checkpointing.memory_gb * 1e9 / (max(1, layers) * layer))


def of_megatron(text: str, world: int, degrees: Mapping[str, int], layers: int) -> tuple[Plan, BurstConfig]:
    """Return the plan over `world` ranks of Megatron's arguments, and the settings of attention.

    degrees: "tp", "cp", "pp", "ep" and "batch", if given; layers: of the model.

    Raises:
        ValueError: illegal or contradictory arguments.
        NotPredictedError: the planner does not support such settings.
    """
    a = _parsed(text)
    tp, cp, pp, ep = (degrees.get(name, 1) for name in ("tp", "cp", "pp", "ep"))
    dp, remainder = divmod(world, tp * cp * pp)
    if remainder:
        raise ValueError(f"TP {tp} x CP {cp} x PP {pp} do not divide {world} ranks")
    micro, remainder = divmod(degrees.get("batch", dp), dp)
    if remainder:
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
    chunks = a.num_virtual_stages_per_pipeline_rank or 1
    if a.num_layers_per_virtual_pipeline_stage:
        chunks = max(1, layers // (pp * a.num_layers_per_virtual_pipeline_stage))
    plan = Plan(
        tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, micro=micro,
        chunks=chunks,
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
    return parser.parse_known_args(shlex.split(text))[0]
