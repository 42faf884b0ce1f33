"""What a DeepSpeed configuration will do on this machine, in words: groups, kernels, bytes, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from burst_mcore.attention.choice import Ranks, best, reason
from burst_mcore.attention.cost import Shard
from burst_mcore.attention.kernels.kernel import Problem
from burst_mcore.attention.kernels.table import choose
from burst_mcore.deepspeed.loss import gradient_scale
from burst_mcore.deepspeed.refusals import refuse_config, refuse_versions, sequence_parallel_size
from burst_mcore.deepspeed.section import Checkpointing, config_dict, section_of
from burst_mcore.deepspeed.settings import part, zero
from burst_mcore.deepspeed.ways import ways
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import DEFAULT
from burst_mcore.segments import cut_for


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the model and the batch that a configuration is explained for; the configuration has none of it."""

    seq: int = 131072
    """Tokens of a sequence."""
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256


def examine(path: Path, *, world: int, per_node: int, shape: Shape) -> Iterator[str]:
    """Lines on what `path` asks for, over `world` ranks, `per_node` of them on a node.

    Bytes and times are the cost model's, for rates of this kind of device; memory is arithmetic.

    Raises:
        SectionError, RefusedError: what `initialize` would raise of the configuration.
        ValueError: no kernel, or no way over the ranks, serves it.
    """
    refuse_versions()
    config = config_dict(path)
    section = section_of(config)
    refuse_config(config)
    size = sequence_parallel_size(config, world)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _dtype(config)
    stage = int(zero(config).stage)
    yield f"groups: {world // size} data-parallel x {size} ranks that share a sequence, consecutive ones"
    intra = min(per_node, size)
    if size % intra or per_node % intra:
        raise ValueError(f"groups of {size} ranks do not go evenly on nodes of {per_node}")
    nodes = size // intra
    yield f"ring: over {nodes} node{'s' * (nodes > 1)}, {intra} ranks a node, layout {section.layout}"
    yield (
        f"ZeRO-{stage}: each rank's part of a gradient is multiplied by {gradient_scale(config, size):g} "
        f"before DeepSpeed reduces it"
    )
    micro = config.get("train_micro_batch_size_per_gpu", 1)
    micro = micro if isinstance(micro, int) else 1
    layout = Layout.of(section.layout)
    padded = layout.padded(shape.seq, size)
    yield f"sequence: {shape.seq} tokens, dealt as {padded}: {padded // size} a rank"
    problem = Problem(device, dtype, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim)
    problem = replace(problem, deterministic=section.deterministic)
    yield f"kernel on this {device}, {_name(dtype)}: {choose(section.kernel, problem).name}"
    grad = section.burst_config().grad_dtype.itemsize
    heads = shape.heads, shape.kv_heads
    shard = Shard(micro, padded // size, *heads, shape.head_dim, shape.head_dim, dtype.itemsize, grad)
    if size > 1:
        found = ways(
            section.burst_config(), shard, Mask.causal(), shape.seq, Ranks(size, intra), DEFAULT[device]
        )
        chosen = best(found)
        times = shape.layers * config.get("gradient_accumulation_steps", 1)
        yield f"way: {chosen.route}, backward {chosen.direction}: {reason(chosen, found)}"
        yield (
            f"bytes of attention a step and rank, {shape.layers} layers: "
            f"{chosen.intra_bytes * times / 1e9:.3g} GB within nodes, "
            f"{chosen.inter_bytes * times / 1e9:.3g} GB between"
        )
    kv = 2 * micro * shard.tokens * shape.kv_heads * shape.head_dim * dtype.itemsize
    bundles = 4 if nodes > 1 else 2
    yield f"memory of a ring: {bundles * kv / 1e9:.3g} GB of keys and values in flight ({bundles} bundles)"
    logits = micro * shard.tokens * shape.vocabulary * 4
    yield (
        f"logits: never whole; unfused they were {logits / 1e9:.3g} GB a rank, and their gradient as much"
        if section.fused_loss
        else f"logits: {logits / 1e9:.3g} GB a rank, and their gradient as much (fused_loss is off)"
    )
    yield f"recompute: {_recompute(section.checkpointing, layout, shape, shard, size)}"


def _recompute(asked: Checkpointing, layout: Layout, shape: Shape, shard: Shard, size: int) -> str:
    """What checkpointed layers keep of causal attention and compute again; one micro-batch in flight."""
    if asked.policy in ("none", "full"):
        return asked.policy
    rows = shard.batch * shard.tokens
    whole = rows * shard.heads * (shard.value_dim * shard.itemsize + shard.statistic)
    keep, at_most = (asked.keep if asked.policy == "segment" else 1.0), False
    if isinstance(keep, str):
        assert asked.memory_gb is not None
        keep, at_most = min(1.0, asked.memory_gb * 1e9 / (shape.layers * whole)), True
    cut = cut_for(keep, layout, Mask.causal(), shape.seq, size, at_most=at_most)
    kept = f"the last {cut.keep:.3g} of the sequence" if cut.at else "the whole sequence"
    moved = f" (asked for: the last {keep:.3g})" if cut.keep != keep else ""
    where = ", in pinned host memory" if asked.offload else ""
    layer = cut.keep * whole
    return (
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
