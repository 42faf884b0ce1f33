"""Attention of one tile in plain torch, on any device: the reference for tests, and for a cache of keys.

It stores all scores. S = scale Q K^T, P = softmax(S), O = P V; the backward is that of `kernel.Backward`.
Letters: B batch, M query rows, N key rows, H K/V heads, G query heads of a K/V head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores
from burst_mcore.attention.kernels.wrappers import keeps_nan_where_seen
from burst_mcore.dtypes import of_parts, wide


def _supports(problem: Problem) -> str | None:
    return None if problem.dtype.is_floating_point else f"dtype {problem.dtype} is not floating point"


def _logits(q_BMHGD: Tensor, k_BNHD: Tensor, pattern: Pattern, scores: Scores) -> Tensor:
    """Return the scores, -inf where a row does not see a column."""
    logits: Tensor = torch.einsum("bmhgd,bnhd->bhgmn", q_BMHGD, k_BNHD) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    rows, columns = logits.shape[-2:]
    if pattern.masked:
        return logits.masked_fill_(~pattern.table_on(logits.device), -torch.inf)
    distance = torch.arange(columns, device=logits.device) - torch.arange(rows, device=logits.device)[:, None]
    if pattern.low is not None:
        logits.masked_fill_(distance < pattern.low, -torch.inf)
    if pattern.high is not None:
        logits.masked_fill_(distance > pattern.high, -torch.inf)
    return logits


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    grouped: Tensor = x.to(wide(x.dtype)).unflatten(2, (kv_heads, -1))
    return grouped


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    k_BNHD, v_BNHD = k.to(wide(k.dtype)), v.to(wide(v.dtype))
    logits = _logits(_grouped(q, k.shape[2]), k_BNHD, pattern, scores)
    maxima = logits.amax(-1, keepdim=True)
    weights = torch.exp(logits - maxima.masked_fill(maxima == -torch.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    # Not exp(logits - lse): with a rounded lse of 1000 the weights of a row would not sum to 1.
    weights /= total.masked_fill(total == 0.0, 1.0)
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights, v_BNHD).flatten(2, 3)
    of_lse = of_parts(q.dtype)
    lse_BHGM = (maxima.to(of_lse) + total.to(of_lse).log()).squeeze(-1)
    return out.to(q.dtype).contiguous(), lse_BHGM.flatten(1, 2)


def _backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    heads, dtype = inputs.k.shape[2], wide(inputs.k.dtype)
    q_BMHGD, dout_BMHGD = _grouped(inputs.q, heads), _grouped(inputs.dout, heads)
    k_BNHD, v_BNHD = inputs.k.to(dtype), inputs.v.to(dtype)
    lse_BHGM, delta_BHGM = (x.to(dtype).unflatten(1, (heads, -1)) for x in (inputs.lse, inputs.delta))
    logits = _logits(q_BMHGD, k_BNHD, pattern, scores)
    blind = lse_BHGM == -torch.inf  # (-inf) - (-inf) is NaN
    weights = torch.exp(logits - lse_BHGM.masked_fill(blind, torch.inf)[..., None])
    dweights = torch.einsum("bmhgd,bnhd->bhgmn", dout_BMHGD, v_BNHD)
    dscores = weights * (dweights - delta_BHGM[..., None]) * scores.scale
    if scores.softcap is not None:  # tanh' = 1 - tanh^2
        dscores *= 1 - logits.masked_fill(logits == -torch.inf, 0.0).div_(scores.softcap).square_()
    dq = torch.einsum("bhgmn,bnhd->bmhgd", dscores, k_BNHD).flatten(2, 3)
    dk = torch.einsum("bhgmn,bmhgd->bnhd", dscores, q_BMHGD)
    dv = torch.einsum("bhgmn,bmhgd->bnhd", weights, dout_BMHGD)
    return dq.to(inputs.q.dtype), dk.to(inputs.k.dtype), dv.to(inputs.v.dtype)


ABILITIES = Abilities(windows=True, masks=True)
PLAIN = Kernel("reference", _supports, _forward, _backward, takes_delta=True, abilities=ABILITIES)
"""The plain kernel: where a table joins several documents, NaN of one document reaches the others."""
KERNEL = keeps_nan_where_seen(PLAIN)
KERNELS = (KERNEL,)


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
