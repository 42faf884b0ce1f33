"""Attention sinks as Megatron keeps them: `softmax_offset`, a logit of each head that brings no value."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def softmax_offset(config: TransformerConfig, pg_collection: Any) -> Tensor | None:
    """Return the sinks for config.softmax_type, [heads of this rank]; a Parameter if they are learnable.

    Raises:
        ValueError: an unknown type.
    """
    kind = getattr(config, "softmax_type", "vanilla")
    if kind not in SOFTMAX_TYPES:
        raise ValueError(f"burst attention takes softmax_type {', '.join(SOFTMAX_TYPES)}, got {kind!r}")
    if kind == "vanilla":
        return None
    group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    heads = config.num_attention_heads // group.size()
    device = torch.cuda.current_device()
    if kind == "off-by-one":
        return torch.zeros(heads, device=device, dtype=config.params_dtype)
    offset = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
    if config.perform_initialization:
        config.init_method(offset)
    return offset
