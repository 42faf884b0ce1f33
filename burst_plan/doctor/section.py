"""Predicts in words what a DeepSpeed configuration will do: groups, kernel, bytes, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from burst_mcore.attention.autotune.choose import best, reason
from burst_mcore.attention.autotune.ways import Ranks
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose, preferred
from burst_mcore.attention.recompute.cuts import cut_for
from burst_mcore.attention.shard import Shard
from burst_mcore.deepspeed.config.refusals import (
    refuse_batch,
    refuse_config,
    refuse_versions,
    sequence_parallel_size,
)
from burst_mcore.deepspeed.config.section import Checkpointing, config_dict, section_of
from burst_mcore.deepspeed.config.settings import part, zero
from burst_mcore.deepspeed.config.ways import ways
from burst_mcore.layout import Layout
from burst_mcore.machines import MACHINES, default_rates, machine
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates
from burst_plan.doctor.memory import Shape, activations, states

HERE = "here"
"""The device that this machine has, as a name beside those of `MACHINES`."""


def examine(
    path: Path,
    *,
    world: int,
    per_node: int,
    shape: Shape,
    device: str = HERE,
    rates: Rates | None = None,
    mask: Mask | None = None,
    with_memory: bool = True,
) -> Iterator[str]:
    """Return lines that describe the configuration at `path` on `world` ranks, `per_node` of them a node.

    Bytes and times are the cost model's, for rates of this kind of device; memory is arithmetic.

    Args:
        device: `HERE`, or a name in `MACHINES`, which need not be in this machine.
        rates: In place of those of the device.
        mask: Of all layers; None is causal.
        with_memory: Whether the last line is an estimate of a rank's memory.

    Raises:
        SectionError, RefusedError: what `initialize` would raise of the configuration.
        ValueError: no kernel, or no way over the ranks, serves it; heads that do not group; no such machine.
    """
    if device != HERE:
        device = machine(device).name  # or ValueError
    mask = Mask.causal() if mask is None else mask
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"{shape.heads} query heads do not group over {shape.kv_heads} K/V heads: their number must be "
            "a divisor of the query heads'"
        )
    quiet()
    refuse_versions()
    config = config_dict(path)
    section = section_of(config)
    refuse_config(config)
    size = sequence_parallel_size(config, world)
    refuse_batch(config, world // size)
    kind = "cuda" if device != HERE or torch.cuda.is_available() else "cpu"
    if rates is None:
        rates = default_rates(kind) if device == HERE else MACHINES[device].rates
    dtype = _dtype(config)
    stage = int(zero(config).stage)
    yield f"groups: {world // size} data-parallel x {size} ranks that share a sequence, consecutive ones"
    intra = min(per_node, size)
    if size % intra or per_node % intra:
        raise ValueError(f"groups of {size} ranks do not go evenly on nodes of {per_node}")
    nodes = size // intra
    over = f"over {nodes} node{'s' * (nodes > 1)}, {intra} ranks a node, layout {section.layout}"
    yield f"ring: {over if size > 1 else 'none, a rank has the whole sequence'}"
    yield (
        f"ZeRO-{stage}: each rank's part of a gradient is multiplied by {size}, and DeepSpeed takes the mean "
        f"over all ranks"
    )
    micro = config.get("train_micro_batch_size_per_gpu", 1)
    micro = micro if isinstance(micro, int) else 1
    layout = Layout.of(section.layout)
    padded = layout.padded(shape.seq, size)
    yield f"sequence: {shape.seq} tokens, dealt as {padded}: {padded // size} a rank"
    problem = Problem(kind, dtype, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    problem = replace(problem, deterministic=section.deterministic)
    if device == HERE:
        yield f"kernel on this {kind}, {_name(dtype)}: {choose(section.kernel, problem).name}"
    elif section.kernel == "auto":
        order = ", ".join(preferred(MACHINES[device].capability, dtype))
        yield f"kernel on {device}, {_name(dtype)}: the first installed that serves, of {order}"
    else:
        yield f"kernel on {device}, {_name(dtype)}: {section.kernel}, as the section asks (not checked here)"
    shard = Shard(
        batch=micro,
        tokens=padded // size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        dtype=dtype,
        grad_dtype=section.burst_config().grad_dtype,
    )
    in_flight = held = 0
    if size > 1:
        candidates = ways(section.burst_config(), shard, mask, shape.seq, Ranks(size, intra), rates)
        chosen = best(candidates)
        held = chosen.resident_bytes
        steps = config.get("gradient_accumulation_steps", 1)
        times = shape.layers * (steps if isinstance(steps, int) else 1)  # "auto" is the Trainer's to say
        yield f"way: {chosen.route}, backward {chosen.direction}: {reason(chosen, candidates)}"
        yield (
            f"bytes of attention a step and rank, {shape.layers} layers: "
            f"{chosen.intra_bytes * times / 1e9:.3g} GB within nodes, "
            f"{chosen.inter_bytes * times / 1e9:.3g} GB between"
        )
        bundles = 4 if nodes > 1 else 2
        in_flight = bundles * shard.kv_bytes
        yield (
            f"memory of a ring: {in_flight / 1e9:.3g} GB of keys and values in flight ({bundles} bundles)"
            + f", and {held / 1e9:.3g} GB of other ranks' rows that stay with a mesh" * (held > 0)
        )
    logits = micro * shard.tokens * shape.vocabulary * 4
    yield (
        f"logits: never whole; unfused they would be {logits / 1e9:.3g} GB a rank, and their gradient as much"
        if section.fused_loss
        else f"logits: {logits / 1e9:.3g} GB a rank, and their gradient as much (fused_loss is off)"
    )
    kept, told = recomputed(section.checkpointing, layout, shape, shard, size, mask)
    yield f"recompute: {told}"
    if not with_memory:
        return
    parts = {
        **states(config, shape.parameters, world, dtype.itemsize),
        "activations": activations(section.checkpointing, shape, shard) + kept,
        "ring": in_flight + held,
        "logits": 0.0 if section.fused_loss else 2.0 * logits,
    }
    there = _memory(device)
    yield (
        f"memory of a rank: about {sum(parts.values()) / 1e9:.3g} GB "
        f"({', '.join(f'{name} {size / 1e9:.3g}' for name, size in parts.items() if size)}), for "
        f"{shape.parameters / 1e9:.3g} billion parameters"
        + ("" if there is None else f"; there are {there / 1e9:.3g} GB")
    )


def quiet() -> None:
    """Name DeepSpeed the CPU where there is no GPU; else it says at length that it looks for one."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _memory(device: str) -> float | None:
    """Return the bytes of a device; None if its memory is that of the whole machine."""
    if device != HERE:
        return MACHINES[device].memory
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def recomputed(
    asked: Checkpointing, layout: Layout, shape: Shape, shard: Shard, size: int, mask: Mask
) -> tuple[float, str]:
    """Return (bytes on the device, words) of the attention that checkpointed layers keep and recompute.

    One micro-batch is in flight.
    """
    if asked.policy in ("none", "full"):
        return 0.0, asked.policy
    whole = shard.result_bytes
    keep, at_most = (asked.keep if asked.policy == "segment" else 1.0), False
    if isinstance(keep, str):
        assert asked.memory_gb is not None
        keep, at_most = min(1.0, asked.memory_gb * 1e9 / (shape.layers * whole)), True
    cut = cut_for(keep, layout, mask, shape.seq, size, at_most=at_most)
    kept = f"the last {cut.keep:.3g} of the sequence" if cut.position else "the whole sequence"
    moved = f" (asked for: the last {keep:.3g})" if cut.keep != keep else ""
    where = ", in pinned host memory" if asked.offload else ""
    layer = cut.keep * whole
    return (0.0 if asked.offload else layer * shape.layers), (
        f"{asked.policy}: O and LSE of {kept}{moved} are kept, on average {layer / 1e6:.3g} MB a layer and "
        f"rank, {layer * shape.layers / 1e9:.3g} GB in all{where}; {cut.time:.0%} of attention's forward is "
        f"computed again"
    )


def _dtype(config: dict) -> torch.dtype:
    if part(config, "bf16").get("enabled") is True:
        return torch.bfloat16
    return torch.float16 if part(config, "fp16").get("enabled") is True else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
