"""Attention of new queries to a cache of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import Scores
from burst_mcore.attention.kernels.reference import PLAIN


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Attend to a cache by the reference kernel, which stores all scores.

    Args:
        q: [B, M, H, D]. k: [B, N, Hkv, D]. v: [B, N, Hkv, Dv].
        allowed: bool [M, N], whether a query sees a key.
        scores: scale and softcap.
        sinks: [H], a logit of each head with a value of zero.

    Returns:
        [B, M, H, Dv].
    """
    out, lse = PLAIN.forward(q, k, v, Pattern.from_table(allowed), scores)  # a row of a cache is one document
    if sinks is not None:  # e^lse / (e^lse + e^sink) = sigmoid(lse - sink)
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).transpose(1, 2)[..., None]
        out = out * share.to(out.dtype)
    return out
