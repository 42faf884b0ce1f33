"""Where segment recompute is attached to a model: the section's "checkpointing"."""

from __future__ import annotations

from typing import Any

from burst_mcore.deepspeed.refusals import RefusedError
from burst_mcore.deepspeed.section import Checkpointing


def attach_checkpointing(model: Any, asked: Checkpointing) -> None:
    """Make the layers of a model of transformers recompute what `asked` says.

    Raises:
        RefusedError: for policies that keep attention, which need burst_mcore.checkpointing.
    """
    if asked.policy == "none":
        return
    if asked.policy == "full":
        model.gradient_checkpointing_enable()
        return
    raise RefusedError(
        "checkpointing",
        f'policy "{asked.policy}" is not available in this version: use "full", or "none"',
    )
