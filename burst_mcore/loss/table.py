"""Which code does the elementwise work on logits: torch anywhere, a Triton kernel on CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burst_mcore.loss.rows import logits_to_gradients

logger = logging.getLogger("burst_mcore")


def rows_for(weight: Tensor) -> Callable[..., Any]:
    """`logits_to_gradients`, or what does the same faster for logits of this weight."""
    if weight.is_cuda and weight.dtype != torch.float64:
        return _triton() or logits_to_gradients
    return logits_to_gradients


@lru_cache
def _triton() -> Callable[..., Any] | None:
    try:
        import burst_mcore.loss.rows_triton as rows_triton
    except ImportError as error:
        logger.warning("no Triton (%s): the elementwise work of the loss takes several passes", error)
        return None
    return rows_triton.logits_to_gradients
