"""Llama 4's layers without rotary positions, which scale queries by the place that a row has in the shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tempered(module: Any, q: Tensor, places: Tensor) -> Tensor:
    """Return the layer's queries, scaled by their places in documents, and no more by those in the shard.

    q: [rows, tokens, heads, head_dim]; places: [rows or 1, tokens].
    """

    def scale(at: Tensor) -> Tensor:
        steps = torch.floor((at + 1.0) / float(module.floor_scale))
        return 1.0 + float(module.attn_scale) * torch.log1p(steps)

    factor = (scale(places) / scale(torch.arange(places.shape[1]))).to(q.device, q.dtype)
    return q * factor[:, :, None, None]
