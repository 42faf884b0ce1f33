"""initialize: an unmodified model, DeepSpeed's JSON -> an engine that trains over sharded sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import data as torch_data

from burst_mcore.agreement.agreement import check_equal, on_all_ranks
from burst_mcore.deepspeed.cpu import prepare_cpu, without_builds
from burst_mcore.deepspeed.groups import SequenceParallelUnit, unit_of
from burst_mcore.deepspeed.section import Section, config_dict, section_of
from burst_mcore.deepspeed.settings import SIZE, refuse_autos, refuse_config, sequence_parallel_size
from burst_mcore.loss.whole import whole_mean
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import UnsupportedError, refuse_versions
from burst_mcore.transformers.models.sequence import SequenceParallel, attached
from burst_mcore.transformers.prepare import prepare_model, sequence_of

logger = logging.getLogger("burst_mcore")

PLAIN = (torch_data.SequentialSampler, torch_data.RandomSampler)
"""Samplers that shard nothing."""
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}
"""The optimizer if there is training data, but neither JSON nor caller has one: with torch's default rate."""


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any],
    training_data: Any = None,
    *,
    collate_fn: Callable | None = None,
    **options: Any,
) -> tuple[Any, Any, ShardedLoader | None, Any]:
    """deepspeed.initialize for long sequences: the same results, and every sequence shared by SP ranks.

    What the JSON must have is "sequence_parallel_size", which divides the world; what the section
    "burst_attention" may have, see docs/reference/deepspeed-section.md. Collective over all ranks.

    The returned engine's loss is the mean over the valid labels of the whole sequence, the same on all ranks
    of a CP group; losses, gradients, clipping and norms are those of SP 1 with as many data-parallel
    ranks.

    Args:
        model: a causal LM of transformers, unmodified, sharded by zero.Init or not. It is prepared in place:
            attn_implementation, the fused loss, hooks around its forward.
        config: DeepSpeed's JSON, as a path or a dict; it is not changed.
        training_data: a dataset, or a DataLoader, or anything that yields batches: see `shard_loader`. With
            it, an optimizer that neither the JSON nor the caller has is `OPTIMIZER`; a warning says so.
        collate_fn: as DataLoader has it; by default samples are padded on the right.
        options: what deepspeed.initialize takes besides (optimizer, model_parameters, lr_scheduler, ...).

    Returns:
        engine, optimizer, loader (None without training_data), scheduler.

    Raises:
        SectionError: the section is not legal: on all ranks.
        UnsupportedError: something would go wrong in training; ranks without an error get an OthersError.
    """
    import deepspeed

    prepare_cpu()
    deepspeed.init_distributed(deepspeed.get_accelerator().communication_backend_name(), verbose=False)
    needs_optimizer = training_data is not None and options.get("optimizer") is None
    section, settings, size = on_all_ranks(lambda: _read(config, options, needs_optimizer))
    check_equal("configuration", (section, size))
    unit = unit_of(size)
    prepare_for_engine(model, section, unit)
    if options.get("optimizer") is None:  # one of the JSON is made for `model_parameters` alone
        options.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=settings, mpu=unit, **options)
    if training_data is None:
        return engine, optimizer, None, scheduler
    drop_last = engine.dataloader_drop_last()
    loader = shard_loader(training_data, engine, collate_fn=collate_fn, drop_last=drop_last)
    return engine, optimizer, loader, scheduler


def prepare_for_engine(model: nn.Module, section: Section, unit: SequenceParallelUnit) -> SequenceParallel:
    """Prepare a model as `prepare_model` does, for the CP groups of `unit`."""
    return prepare_model(
        model,
        group=unit.sequence,
        config=section.attention,
        fused_loss=section.fused_loss,
        recompute=section.checkpointing.recomputed(),
        towers=section.towers,
    )


def shard_loader(
    data: Any, engine: Any, *, collate_fn: Callable | None = None, drop_last: bool = False
) -> ShardedLoader:
    """Return a loader for an engine of `initialize`, such as one of evaluation data.

    A dataset is sharded over data-parallel ranks as DeepSpeed does. A DataLoader keeps its sampler; one whose
    DistributedSampler shards over all ranks brings each rank's own. What shards nothing itself, a plain
    DataLoader or an IterableDataset, is the same on every data-parallel rank; a warning says so.
    """
    sequence, per_rank = sequence_of(engine.module), False
    world, size = dist.get_world_size(), sequence.topology.size
    dataset = data.dataset if isinstance(data, torch_data.DataLoader) else data
    streams = isinstance(dataset, torch_data.IterableDataset)
    repeats = streams or (isinstance(data, torch_data.DataLoader) and type(data.sampler) in PLAIN)
    if repeats and world > size and dist.get_rank() == 0:
        sampler = f"DistributedSampler(num_replicas={world // size}, rank=rank // SP)"
        takes = f"{world // size} data-parallel ranks each take all samples of this {type(data).__name__}"
        logger.warning(f"{takes}: give a dataset, or a DataLoader with {sampler}")
    if isinstance(data, torch_data.DataLoader):
        per_rank = size > 1 and getattr(data.sampler, "num_replicas", None) == world
    elif isinstance(data, torch_data.Dataset) or hasattr(data, "__getitem__"):
        options: dict[str, Any] = {"collate_fn": collate_fn or collated, "drop_last": drop_last}
        if not streams:
            rank = dist.get_rank() // size
            options["sampler"] = torch_data.DistributedSampler(data, num_replicas=world // size, rank=rank)
        data = torch_data.DataLoader(data, engine.train_micro_batch_size_per_gpu(), **options)
    return ShardedLoader(data, group=sequence.group, own=per_rank, device=engine.device, **sequence.sharding)


def whole_loss(total: Tensor, count: Tensor | float, engine: Any = None) -> Tensor:
    """Return the mean loss of whole sequences, the same on all their ranks, from each rank's part of it.

    It is for losses that are made of a shard's logits. Its gradient is that of one process, on every ZeRO
    stage. Collective over the CP group.

    Args:
        total: the sum of the losses, or weighted losses, of this rank's tokens.
        count: how many labels this rank's tokens have, or the sum of their weights; 0 on all ranks is a loss
            of 0.
        engine: of `initialize`, where there are engines of several CP groups.

    Raises:
        UnsupportedError: the CP group is not known.
    """
    if engine is not None:
        return whole_mean(total, count, sequence_of(engine.module).group)
    groups = {sequence.group for sequence in attached}
    if len(groups) != 1:
        raise UnsupportedError("loss", f"models have {len(groups)} CP groups: give whole_loss an engine=")
    return whole_mean(total, count, groups.pop())


def _read(
    config: str | Path | Mapping[str, Any], options: Mapping[str, Any], needs_optimizer: bool
) -> tuple[Section, dict[str, Any], int]:
    """Return the section, DeepSpeed's settings, and how many ranks share a sequence."""
    refuse_versions()
    settings = config_dict(config)
    section = section_of(settings)
    for name in (x for x in ("mpu", "mesh_param") if options.get(x) is not None):
        raise UnsupportedError(name, "the CP groups are made here, of consecutive ranks: leave it out")
    refuse_config(settings)
    refuse_autos(settings)
    if needs_optimizer and "optimizer" not in settings:
        logger.warning("the JSON names no optimizer: %s", OPTIMIZER)
        settings["optimizer"] = OPTIMIZER
    settings[SIZE] = size = sequence_parallel_size(settings, dist.get_world_size())
    return section, without_builds(settings), size
