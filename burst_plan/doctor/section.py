"""Predicts the attention of a DeepSpeed configuration, as text: groups, kernel, bytes, recompute."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from burst_mcore.attention.choose import Question
from burst_mcore.attention.geometry.cuts import cut_for
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import PREFERENCE, choose
from burst_mcore.deepspeed.section import Checkpointing, section_of
from burst_mcore.deepspeed.settings import part, refuse_config, sequence_parallel_size, zero
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import default_rates
from burst_mcore.transformers.errors import refuse, refuse_versions
from burst_plan.doctor.configured import Options, number, share_kept
from burst_plan.simulate.reason import reason
from burst_plan.simulate.search import taken, tried
from burst_plan.step.model import Model
from burst_plan.step.recurrence import told


def examine(
    config: Mapping[str, Any], model: Model, seq: int, mask: Mask, world: int, options: Options
) -> Iterator[str]:
    """Return lines on DeepSpeed's JSON, `config`, on `world` ranks; mask: of all layers.

    Bytes and times are the cost model's, for rates of this kind of device.

    Raises:
        SectionError, UnsupportedError: what `initialize` would raise of the configuration.
        ValueError: no kernel, or no candidate over the ranks, supports it.
    """
    refuse_versions()
    section = section_of(config)
    refuse_config(config)
    size = sequence_parallel_size(config, world)
    machine, per_node = options.machine, options.node(world)
    kind = "cuda" if machine is not None or torch.cuda.is_available() else "cpu"
    rates = options.rates or (default_rates(kind) if machine is None else machine.rates)
    dtype = _dtype(config)
    of_device = str(dtype).removeprefix("torch.")
    stage = int(zero(config).stage)
    yield f"groups: {world // size} data-parallel x {size} ranks that share a sequence, consecutive ones"
    intra = min(per_node, size)
    if size % intra or per_node % intra:
        raise ValueError(f"groups of {size} ranks do not go evenly on nodes of {per_node}")
    nodes = size // intra
    over = f"over {nodes} node{'s' * (nodes > 1)}, {intra} ranks a node, layout {section.attention.layout}"
    yield f"ring: {over if size > 1 else 'none, a rank has the whole sequence'}"
    yield (
        f"ZeRO-{stage}: each rank's part of a gradient is multiplied by {size}, and DeepSpeed takes the mean "
        f"over all ranks"
    )
    micro = number(config, "train_micro_batch_size_per_gpu")
    layout = Layout.of(section.attention.layout)
    padded = layout.padded(seq, size)
    yield f"sequence: {seq} tokens, sharded as {padded}: {padded // size} a rank"
    try:
        yield from told(model, str(layout), seq, Ranks(size, intra), rates)
    except ValueError as error:
        refuse("layout", str(error))
    problem = Problem(kind, dtype, model.heads, model.kv_heads, model.head_dim, model.value_dim)
    problem = replace(problem, deterministic=section.attention.deterministic)
    if not model.attending:
        yield "kernel of attention: none, no layer has attention"
    elif machine is None:
        yield f"kernel on this {kind}, {of_device}: {choose(section.attention.kernel, problem).name}"
    elif section.attention.kernel == "auto":
        order = ", ".join(x for x in PREFERENCE[machine.capability] if dtype.itemsize == 2 or x == "triton")
        yield f"kernel on {machine.name}, {of_device}: the first installed that supports the call, of {order}"
    else:
        kernel_words = f"{section.attention.kernel}, as the section asks (not checked here)"
        yield f"kernel on {machine.name}, {of_device}: {kernel_words}"
    shard = Shard(
        batch=micro, tokens=padded // size, heads=model.heads, kv_heads=model.kv_heads, dtype=dtype,
        head_dim=model.head_dim, value_dim=model.value_dim, grad_dtype=section.attention.grad_dtype,
    )  # fmt: skip
    if size > 1 and model.attending:
        question = Question(shard, layout, mask, seq, Ranks(size, intra), rates).typical
        candidates = tried(section.attention, question)
        chosen = taken(section.attention, question)
        times = model.attending * number(config, "gradient_accumulation_steps")
        yield f"route: {chosen.route}, backward {chosen.direction}: {reason(chosen, candidates)}"
        yield (
            f"bytes of attention a step and rank, {model.attending} layers: "
            f"{chosen.intra_bytes * times / 1e9:.3g} GB within nodes, "
            f"{chosen.inter_bytes * times / 1e9:.3g} GB between"
        )
    logits = micro * shard.tokens * model.vocab * 4
    yield (
        f"logits: never whole; unfused they would be {logits / 1e9:.3g} GB a rank, and their gradient as much"
        if section.fused_loss
        else f"logits: {logits / 1e9:.3g} GB a rank, and their gradient as much (fused_loss is off)"
    )
    yield f"recompute: {recomputed(section.checkpointing, layout, model.attending, seq, shard, size, mask)}"


def quiet() -> None:
    """Set DeepSpeed's accelerator to CPU on a machine without GPU; else it prints its long search for one."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def recomputed(
    checkpointing: Checkpointing, layout: Layout, layers: int, seq: int, shard: Shard, size: int, mask: Mask
) -> str:
    """Return a note on the attention that checkpointed layers keep, and the share that they recompute.

    One micro-batch is in flight.
    """
    if checkpointing.policy in ("none", "full") or not layers:
        return checkpointing.policy
    keep = share_kept(checkpointing, layers, shard.result_bytes)
    at_most = checkpointing.policy == "segment" and isinstance(checkpointing.keep, str)
    cut = cut_for(keep, layout, mask, seq, size, at_most=at_most)
    suffix = f"the last {cut.keep:.3g} of the sequence" if cut.position else "the whole sequence"
    request = f" (asked for: the last {keep:.3g})" if cut.keep != keep else ""
    where = ", in pinned host memory" if checkpointing.offload else ""
    layer = cut.keep * shard.result_bytes
    return (
        f"{checkpointing.policy}: O and LSE of {suffix}{request} are kept, on average {layer / 1e6:.3g} MB a "
        f"layer and rank, {layer * layers / 1e9:.3g} GB in all{where}; {cut.time:.0%} of attention's forward "
        f"is computed again"
    )


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    if part(config, "bf16").get("enabled") is True:
        return torch.bfloat16
    return torch.float16 if part(config, "fp16").get("enabled") is True else torch.float32
