"""Prepares a model before DeepSpeed makes an engine of it: attention, loss, recompute, hooks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from burst_mcore.attention.api import connect
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.deepspeed.config.section import Section
from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.deepspeed.models.checkpointing import attach_checkpointing
from burst_mcore.deepspeed.models.rotary import attach_rotary, depends_on_length
from burst_mcore.deepspeed.models.sequence import SequenceParallel
from burst_mcore.deepspeed.models.served import checked_loss, position_table, use_burst
from burst_mcore.deepspeed.models.trl import has_fused_head
from burst_mcore.deepspeed.ranks.agreement import on_all_ranks, refuse_differences
from burst_mcore.deepspeed.ranks.groups import topology_of
from burst_mcore.digest import digest
from burst_mcore.loss import patch_causal_lm

SEQUENCE = "_burst_mcore_sequence"
"""The attribute of a prepared model that has its `SequenceParallel`."""


def prepare_model(model: nn.Module, section: Section, unit: Any) -> SequenceParallel:
    """Prepare a model, in place. A second call changes nothing more.

    Collective over all ranks; the first logs how many of them share a sequence, and whose loss it is.

    Raises:
        RefusedError: the model cannot be served; or the ranks have different ones.
    """
    size = unit.get_sequence_parallel_world_size()
    loss = on_all_ranks(lambda: _change(model, section, size))
    refuse_differences("model", _fingerprint(model))
    burst = section.burst_config()
    topology = on_all_ranks(lambda: _connected(unit, burst))
    sequence = vars(model).get(SEQUENCE)
    if sequence is None:
        sequence = SequenceParallel(model, topology, None, burst).attach()
        vars(model)[SEQUENCE] = sequence
    assert isinstance(sequence, SequenceParallel)
    sequence.topology, sequence.config = topology, burst
    sequence.group = unit.get_sequence_parallel_group() if size > 1 else None
    sequence.most_positions = position_table(model)
    sequence.dealing = _dealing(model, burst)
    groups = dist.get_world_size() // size
    _log(f"burst_mcore: {size} ranks share each sequence, {groups} sequence group(s); {loss}")
    return sequence


def sequence_of(model: nn.Module) -> SequenceParallel:
    """Return what `prepare_model` attached to a model.

    Raises:
        RefusedError: it was not prepared.
    """
    sequence = vars(model).get(SEQUENCE)
    if not isinstance(sequence, SequenceParallel):
        raise RefusedError("model", "it was not prepared by burst_mcore.deepspeed.initialize")
    return sequence


def _change(model: Any, section: Section, size: int) -> str:
    """Set attention, loss and recompute of a model, without communication; say whose loss it is."""
    if not isinstance(model, nn.Module):
        raise RefusedError("model", f"give the model itself, got {model!r}")
    inner = use_burst(model, size)
    checked_loss(inner, size)
    attach_rotary(inner)
    loss = "the loss is the model's own, of logits"
    if has_fused_head(inner):
        loss = "the loss is left to TRL's fused head"
    elif section.fused_loss:
        loss = "the loss is fused with the LM head"
        try:
            patch_causal_lm(inner)
        except ValueError as error:
            raise RefusedError(
                "loss", f'{error}. With "fused_loss": false in the section the loss is left to the model'
            ) from None
    attach_checkpointing(inner, section.checkpointing)
    return loss


def _connected(unit: Any, config: BurstConfig) -> Topology:
    topology = topology_of(unit)
    try:
        connect(topology, config)
    except ValueError as error:
        raise RefusedError("head_parallel", str(error)) from None
    return topology


def _dealing(model: nn.Module, config: BurstConfig) -> dict[str, Any]:
    """Return how a model's batches are dealt: keyword arguments of `ShardedLoader`."""
    settings: Any = getattr(model, "config", None)
    text = settings.get_text_config() if hasattr(settings, "get_text_config") else settings
    most = getattr(text, "max_position_embeddings", None)
    if any(map(depends_on_length, model.modules())):
        most = 0  # padding must not make the sequence look longer: its positions start again from 0
    pad_token_id = getattr(text, "pad_token_id", None) or 0
    return {"layout": config.layout, "pad_token_id": pad_token_id, "max_positions": most}


def _fingerprint(model: nn.Module) -> str:
    """Return words that are equal on ranks with equal models: class, number and digest of parameters."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    settings: Any = getattr(model, "config", None)
    told = settings.to_json_string() if hasattr(settings, "to_json_string") else ""
    name = digest(f"{shapes}{told}")
    return f"a {type(model).__name__} of {len(shapes)} parameters (digest of shapes and config {name})"


def _log(line: str) -> None:
    """Log a line in DeepSpeed's log, once for all ranks, at the level that its users see by default."""
    from deepspeed.utils import logger

    if dist.get_rank() == 0:  # DeepSpeed's log_dist knows ranks only once an engine was made
        logger.warning(line)
