"""Rotary embeddings whose frequencies depend on the length get the length of the whole sequence.

transformers takes the length from the highest position that it sees. Over a shard that is the shard's, so
that every rank would rotate in its own way. Here the highest position of all comes as one more token, whose
sine and cosine are dropped again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.attention import current


def attach_rotary(model: nn.Module) -> None:
    """Add the hooks, once."""
    for module in model.modules():
        if depends_on_length(module) and _with_last not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_with_last, with_kwargs=True)
            module.register_forward_hook(_without_last)


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding of transformers of kind "dynamic" or "longrope"."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def _with_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = current()
    if sequence is None or sequence.last is None:
        return None
    arguments = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
    positions = arguments.get("position_ids")
    if len(args) > 2 or not isinstance(positions, torch.Tensor) or positions.dim() != 2:
        takes = "takes the length of the sequence from elsewhere than position_ids [rows, tokens]"
        raise UnsupportedError("model", f"{type(module).__name__} {takes}")
    last = positions.new_full((positions.shape[0], 1), sequence.last)
    return (), {**arguments, "position_ids": torch.cat([positions, last], 1)}


def _without_last(module: nn.Module, args: Any, out: Any) -> Any:
    sequence = current()
    if sequence is None or sequence.last is None:
        return None
    return tuple(x[:, :-1] for x in out)
