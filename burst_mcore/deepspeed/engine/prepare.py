"""Prepares a model before DeepSpeed makes an engine of it, as the section of the JSON asks."""

from __future__ import annotations

from typing import Any

from torch import nn

from burst_mcore.deepspeed.config.section import Section
from burst_mcore.transformers.models.sequence import SequenceParallel
from burst_mcore.transformers.prepare import prepare_model


def prepare_for_engine(model: nn.Module, section: Section, unit: Any) -> SequenceParallel:
    """Prepare a model, in place, for the sequence groups of an mpu, `unit`. Collective over all ranks.

    DeepSpeed's log has the line about it, at the level that its users see by default: its log_dist knows
    ranks only once an engine was made.

    Raises:
        RefusedError: as `prepare_model`.
    """
    from deepspeed.utils import logger

    return prepare_model(
        model,
        group=unit.get_sequence_parallel_group(),
        config=section.burst_config(),
        fused_loss=section.fused_loss,
        recompute=section.checkpointing.recomputed(),
        log=logger,
    )
