"""Attention of new queries to a cache of keys, and the merge of attention over two sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import Scores
from burst_mcore.attention.kernels.reference import PLAIN


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Attend to a cache by the kernel of plain torch, which stores all scores.

    Args:
        q: [B, M, H, D]. k: [B, N, Hkv, D]. v: [B, N, Hkv, Dv].
        allowed: bool [M, N], which queries see which keys.
        scores: scale and softcap.
        sinks: [H], a logit of each head that brings no value.

    Returns:
        [B, M, H, Dv].
    """
    out, lse = PLAIN.forward(q, k, v, Pattern.from_table(allowed), scores)  # a row of a cache is one document
    if sinks is not None:  # it takes its share of the softmax
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).transpose(1, 2)[..., None]
        out = out * share.to(out.dtype)
    return out


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention over two disjoint sets of keys. Differentiable in all arguments.

    Local to a rank: each rank attends by `burst_attention(..., return_lse=True)` to both sets, and merges its
    rows. Both have the weights exp(lse_i - lse) (FlashAttention, Dao et al. 2022, section 3.1).

    Args:
        out, other: [batch, local sequence, heads, value_dim], of one dtype.
        lse, other_lse: [batch, local sequence, heads]; -inf where a query saw no key.

    Returns:
        out in the dtype of `out`, and lse in that of `lse`. A query that no set shows a key has zeros, -inf.

    Raises:
        ValueError: shapes that do not go together.
    """
    shapes = [tuple(x.shape) for x in (out, lse, other, other_lse)]
    if not shapes[0] == shapes[2] or not shapes[0][:-1] == shapes[1] == shapes[3]:
        raise ValueError(
            f"merge takes two outputs [batch, local sequence, heads, value_dim] of one shape, each with its "
            f"lse [batch, local sequence, heads], got {', '.join(map(str, shapes))}"
        )
    unseen = torch.isneginf(torch.maximum(lse, other_lse))  # zeros in their place keep gradients finite
    lse, other_lse = lse.masked_fill(unseen, 0.0), other_lse.masked_fill(unseen, 0.0)
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - total).exp().masked_fill(unseen, 0)[..., None] for x in (lse, other_lse))
    merged = weight * out + other_weight * other
    return merged.to(out.dtype), total.masked_fill(unseen, -torch.inf)
