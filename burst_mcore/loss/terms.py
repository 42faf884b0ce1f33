"""The terms of a token's loss, and the loss from statistics of its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_mcore.words import brief, is_finite

LSE, LABEL, TOTAL, LARGEST, ENTROPY = range(5)
"""The rows of a tensor of statistics [5, tokens] of a token's logits z (after cap and temperature).

logsumexp(z), the label's z, sum(z), max(z), and the entropy of softmax(z)."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a token's loss besides the cross-entropy of its logits.

    Raises:
        ValueError: a value that is not finite or out of its range.
    """

    z_loss: float = 0.0
    """Factor of logsumexp(z)^2, at least 0."""
    label_smoothing: float = 0.0
    """The share of the label's probability that the whole vocabulary gets, from 0 to 1."""
    softcap: float | None = None
    """Logits become softcap tanh(logits / softcap)."""
    temperature: float = 1.0
    """Divisor of the logits, after the cap."""

    def __post_init__(self) -> None:
        _number("z_loss", self.z_loss, 0.0, math.inf)
        _number("label_smoothing", self.label_smoothing, 0.0, 1.0)
        _number("temperature", self.temperature, 0.0, math.inf, above=True)
        if self.softcap is not None:
            _number("softcap", self.softcap, 0.0, math.inf, above=True)


def _number(name: str, value: object, minimum: float, maximum: float, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    if not number or not minimum <= value <= maximum or (above and value == minimum):  # type: ignore[operator]
        words = f"above {minimum:g}" if above else f"at least {minimum:g}"
        words += f" and at most {maximum:g}" if math.isfinite(maximum) else ""
        raise ValueError(f"{name} must be a finite number {words}, got {brief(value)}")


def combined(parts: Tensor) -> Tensor:
    """Return the statistics [5, tokens] of whole rows from their parts [parts, 5, tokens].

    With s_k = exp(lse_k - lse): lse = log sum_k exp(lse_k), H = sum_k s_k (H_k + lse - lse_k).
    """
    lse = torch.logsumexp(parts[:, LSE], 0)
    shares = torch.exp(parts[:, LSE] - lse)
    largest = parts[:, LARGEST].amax(0)
    entropy = shares * (parts[:, ENTROPY] + lse - parts[:, LSE])
    entropy = entropy.where(shares > 0, 0.0).sum(0)  # a part may have no columns
    return torch.stack([lse, parts[:, LABEL].sum(0), parts[:, TOTAL].sum(0), largest, entropy])


def losses(statistics: Tensor, terms: Terms, vocabulary: int) -> Tensor:
    """Return the loss of each token, [tokens], with smoothing e (as torch defines it) and z-loss.

    l = lse - (1 - e) z_y - e / V sum_j z_j + z_loss lse^2.
    """
    lse, confidence = statistics[LSE], 1.0 - terms.label_smoothing
    loss = lse - confidence * statistics[LABEL]
    if terms.label_smoothing:
        loss = loss - terms.label_smoothing / vocabulary * statistics[TOTAL]
    return loss + terms.z_loss * lse.square() if terms.z_loss else loss
