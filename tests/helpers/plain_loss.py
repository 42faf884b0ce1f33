"""The loss in plain PyTorch, with all its logits: what `fused_linear_cross_entropy` must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from burst_mcore.dtypes import wide


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Compute `fused_linear_cross_entropy` on one process; hidden [..., d], weight [V, d], labels [...]."""
    logits = functional.linear(hidden, weight, bias).to(wide(hidden.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = (logits / temperature).flatten(0, -2)
    y = labels.flatten()
    losses = functional.cross_entropy(
        logits, y, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    valid = y != ignore_index
    losses = losses + z_loss * torch.logsumexp(logits, -1).square() * valid
    if reduction == "none":
        return losses.view_as(labels)
    w = valid.to(losses.dtype) if weights is None else valid * weights.flatten().to(losses.dtype)
    total = w.sum() if reduction == "mean" else w.new_ones(())
    return (w * losses).sum() / total.where(total != 0, torch.ones_like(total))
