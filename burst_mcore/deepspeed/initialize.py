"""initialize: an unmodified model, DeepSpeed's JSON -> an engine that trains over sharded sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from burst_mcore.attention.function import connect
from burst_mcore.attention.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.deepspeed.agreement import on_all_ranks, refuse_differences
from burst_mcore.deepspeed.checkpointing import attach_checkpointing
from burst_mcore.deepspeed.cpu import prepare_cpu, without_builds
from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.deepspeed.groups import topology_of, unit_of
from burst_mcore.deepspeed.loader import ShardedLoader, loader_for
from burst_mcore.deepspeed.loss import gradient_scale, refuse_large_parameters
from burst_mcore.deepspeed.models import checked_loss, use_burst
from burst_mcore.deepspeed.refusals import (
    refuse_config,
    refuse_mpu,
    refuse_versions,
    sequence_parallel_size,
)
from burst_mcore.deepspeed.rotary import attach_rotary, depends_on_length
from burst_mcore.deepspeed.section import Section, config_dict, section_of
from burst_mcore.deepspeed.sequence import SequenceParallel
from burst_mcore.loss import patch_causal_lm

logger = logging.getLogger("burst_mcore")

SEQUENCE = "_burst_mcore_sequence"
"""The attribute of a prepared model that has its `SequenceParallel`."""
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}
"""Where there is data to train on, and neither JSON nor caller has an optimizer: torch's default."""


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    training_data: Any = None,
    *,
    mpu: Any = None,
    collate_fn: Callable | None = None,
    pad_token_id: int | None = None,
    mesh_param: Any = None,
    **options: Any,
) -> tuple[Any, Any, ShardedLoader | None, Any]:
    """deepspeed.initialize for long sequences: the same results, and every sequence shared by SP ranks.

    What the JSON must have is "sequence_parallel_size" (1 without it), which divides the world; what the
    section "burst_attention" may have, see docs/deepspeed-section.md. Collective over all ranks.

    The returned engine's loss is the mean over the valid labels of the whole sequence, the same on all ranks
    of a sequence group; losses, gradients, clipping and norms are those of SP 1 with as many data-parallel
    ranks.

    Args:
        model: a causal LM of transformers, unmodified, dealt by zero.Init or not. It is prepared in place:
            attn_implementation, the fused loss, hooks around its forward.
        config: DeepSpeed's JSON, as a path or a dict; it is not changed.
        training_data: a dataset, or a DataLoader, or anything that yields batches: see `loader_for`. With it,
            an optimizer that neither the JSON nor the caller has is `OPTIMIZER`; a warning says so.
        mpu: sequence groups that exist; by default they are made, consecutive ranks sharing a sequence.
        collate_fn: as DataLoader has it; by default samples are padded on the right.
        pad_token_id: default the model's, or 0.
        options: what deepspeed.initialize takes besides (optimizer, model_parameters, lr_scheduler, ...).

    Returns:
        engine, optimizer, loader (None without training_data), scheduler.

    Raises:
        SectionError: the section is not legal: on all ranks.
        RefusedError: something would go wrong in training: on all ranks, each with its name.
    """
    import deepspeed

    prepare_cpu()
    deepspeed.init_distributed(deepspeed.get_accelerator().communication_backend_name(), verbose=False)
    optimized = training_data is None or options.get("optimizer") is not None
    section, settings, size = on_all_ranks(lambda: _read(config, mesh_param, optimized))
    refuse_differences("configuration", (section, size, "no mpu" if mpu is None else "an mpu"))
    if mpu is not None:
        on_all_ranks(lambda: refuse_mpu(settings, mpu, size))
    unit = unit_of(size) if mpu is None else mpu
    sequence = prepare_model(model, section, settings, unit)
    settings["sequence_parallel_size"] = size
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, config=settings, mpu=unit, **_with_parameters(model, options)
    )
    if training_data is None:
        return engine, optimizer, None, scheduler
    loader = shard_loader(
        training_data,
        engine,
        collate_fn=collate_fn,
        drop_last=engine.dataloader_drop_last(),
        pad_token_id=pad_token_id,
        sequence=sequence,
    )
    return engine, optimizer, loader, scheduler


def shard_loader(
    data: Any,
    engine: Any,
    *,
    sequence: SequenceParallel | None = None,
    pad_token_id: int | None = None,
    **options: Any,
) -> ShardedLoader:
    """A loader for an engine of `initialize`: of evaluation data, say. `options`: those of `loader_for`."""
    sequence = sequence or sequence_of(engine.module)
    how = dealing(engine.module, sequence)
    if pad_token_id is not None:
        how["pad_token_id"] = pad_token_id
    size = engine.train_micro_batch_size_per_gpu()
    return loader_for(data, batch_size=size, group=sequence.group, device=engine.device, **how, **options)


def dealing(model: nn.Module, sequence: SequenceParallel) -> dict[str, Any]:
    """How batches are dealt that a model is given: keyword arguments of `ShardedLoader`."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    if any(map(depends_on_length, model.modules())):
        most = 0  # padding must not make the sequence look longer: its positions start again from 0
    pad_token_id = getattr(text, "pad_token_id", None) or 0
    return {"layout": sequence.config.layout, "pad_token_id": pad_token_id, "max_positions": most}


def prepare_model(
    model: nn.Module, section: Section, config: Mapping[str, Any], unit: Any
) -> SequenceParallel:
    """All that is done to a model, in place. `config`: DeepSpeed's. Preparing twice is preparing once.

    Collective over all ranks.
    """
    size = unit.get_sequence_parallel_world_size()
    on_all_ranks(lambda: _change(model, section, config, size))
    burst = section.burst_config()
    topology = on_all_ranks(lambda: _connected(unit, burst))
    found = vars(model).get(SEQUENCE)
    if found is None:
        vars(model)[SEQUENCE] = found = SequenceParallel(model, topology, None, burst).attach()
    found.topology, found.config = topology, burst
    found.group = unit.get_sequence_parallel_group() if size > 1 else None
    found.scale = gradient_scale(config, size)
    assert isinstance(found, SequenceParallel)
    return found


def _connected(unit: Any, config: BurstConfig) -> Topology:
    topology = topology_of(unit)
    connect(topology, config)
    return topology


def _change(model: nn.Module, section: Section, config: Mapping[str, Any], size: int) -> None:
    """Attention, loss and recompute of a model; nothing is communicated."""
    refuse_large_parameters(config, model.parameters())
    inner = use_burst(model, size)
    checked_loss(inner, size)
    attach_rotary(inner)
    if section.fused_loss:
        patch_causal_lm(inner)
    attach_checkpointing(inner, section.checkpointing)


def sequence_of(model: nn.Module) -> SequenceParallel:
    """What `prepare_model` made for a model.

    Raises:
        RefusedError: it was not prepared.
    """
    found = vars(model).get(SEQUENCE)
    if not isinstance(found, SequenceParallel):
        raise RefusedError("model", "it was not prepared by burst_mcore.deepspeed.initialize")
    return found


def _read(
    config: str | Path | Mapping[str, Any], mesh_param: Any, optimized: bool
) -> tuple[Section, dict[str, Any], int]:
    """Section, DeepSpeed's settings, ranks that share a sequence. optimized: the caller sees to that."""
    refuse_versions()
    settings = config_dict(config)
    section = section_of(settings)
    refuse_config(settings, mesh_param)
    if not optimized and "optimizer" not in settings:
        logger.warning("the JSON names no optimizer: %s", OPTIMIZER)
        settings["optimizer"] = OPTIMIZER
    return section, without_builds(settings), sequence_parallel_size(settings, dist.get_world_size())


def _with_parameters(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed makes an optimizer of the JSON for `model_parameters` alone."""
    if options.get("optimizer") is None:
        options.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    return options
