"""TRL's fused LM head over shards: log-probabilities of every token of the whole sequence, on every rank.

TRL (1.x) replaces the forward of its models. With `fused_lm_head=True` that forward returns numbers for each
token (log-probability, entropy, ...) instead of logits, and takes labels of a shard as `shift_labels`:
https://github.com/huggingface/trl, trl/trainer/utils.py, add_fused_lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def has_fused_head(model: nn.Module) -> bool:
    """Return whether TRL has replaced the model's forward."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and code.co_qualname.startswith("add_fused_lm_head.")


def asks_for_fused_head(arguments: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments returns numbers for each token, not logits."""
    return bool(arguments.get("fused_lm_head"))
