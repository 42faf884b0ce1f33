"""TRL's fused LM head over shards: log-probabilities of every token of the whole sequence, on every rank.

TRL (1.x) replaces the forward of its models. With `fused_lm_head=True` that forward returns numbers for each
token (log-probability, entropy, ...) instead of logits, and takes labels of a shard as `shift_labels`:
https://github.com/huggingface/trl, trl/trainer/utils.py, add_fused_lm_head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def has_fused_head(model: nn.Module) -> bool:
    """Return whether TRL has replaced the model's forward."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and code.co_qualname.startswith("add_fused_lm_head.")


def asks_for_fused_head(arguments: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments returns numbers for each token, not logits."""
    return bool(arguments.get("fused_lm_head"))


def gather_tokens(output: Any, *, local: int, end: int | None, gather: Callable[[Tensor], Tensor]) -> Any:
    """Return the output of TRL's head with numbers for each token of the whole sequence, not of a shard.

    Args:
        local: tokens of the shard; what has another shape than [rows, local] stays.
        end: tokens to keep; None keeps all.
        gather: returns the numbers of the whole sequence.
    """
    for name, value in output.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == local:
            output[name] = gather(value)[:, :end]
    return output
