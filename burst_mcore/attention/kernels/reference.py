"""Attention of one tile in plain torch, on any device: the definition that the other kernels are held to.

It stores all scores. Letters: B batch, M query rows, N key rows, H K/V heads, G query heads of a K/V head,
D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import Abilities, Seen
from burst_mcore.attention.kernels.finite import keeps_nan_where_seen
from burst_mcore.attention.kernels.kernel import Kernel, Problem, RowGradients, Scores
from burst_mcore.dtypes import wide


def _supports(problem: Problem) -> str | None:
    return None if problem.dtype.is_floating_point else f"dtype {problem.dtype} is not floating point"


def _scores(q_BMHGD: Tensor, k_BNHD: Tensor, seen: Seen, how: Scores) -> Tensor:
    """-inf where not seen."""
    scores: Tensor = torch.einsum("bmhgd,bnhd->bhgmn", q_BMHGD, k_BNHD) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    rows, columns = scores.shape[-2:]
    if seen.masked:
        return scores.masked_fill_(~seen.table_on(scores.device), -torch.inf)
    ahead = torch.arange(columns, device=scores.device) - torch.arange(rows, device=scores.device)[:, None]
    if seen.low is not None:
        scores.masked_fill_(ahead < seen.low, -torch.inf)
    if seen.high is not None:
        scores.masked_fill_(ahead > seen.high, -torch.inf)
    return scores


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    grouped: Tensor = x.to(wide(x.dtype)).unflatten(2, (kv_heads, -1))
    return grouped


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
    k_BNHD, v_BNHD = k.to(wide(k.dtype)), v.to(wide(v.dtype))
    scores = _scores(_grouped(q, k.shape[2]), k_BNHD, seen, how)
    lse_BHGM = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse_BHGM.masked_fill(lse_BHGM == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights, v_BNHD).flatten(2, 3)
    return out.to(q.dtype).contiguous(), lse_BHGM.flatten(1, 2)


def _backward(x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
    heads, dtype = x.k.shape[2], wide(x.k.dtype)
    q_BMHGD, dout_BMHGD = _grouped(x.q, heads), _grouped(x.dout, heads)
    k_BNHD, v_BNHD = x.k.to(dtype), x.v.to(dtype)
    lse_BHGM, delta_BHGM = (rows.unflatten(1, (heads, -1)) for rows in (x.lse, x.delta))
    scores = _scores(q_BMHGD, k_BNHD, seen, how)
    blind = lse_BHGM == -torch.inf  # (-inf) - (-inf) is NaN
    weights = torch.exp(scores - lse_BHGM.masked_fill(blind, torch.inf)[..., None])
    dweights = torch.einsum("bmhgd,bnhd->bhgmn", dout_BMHGD, v_BNHD)
    dscores = weights * (dweights - delta_BHGM[..., None]) * how.scale
    if how.softcap is not None:  # tanh' = 1 - tanh^2
        dscores *= 1 - scores.masked_fill(scores == -torch.inf, 0.0).div_(how.softcap).square_()
    dq = torch.einsum("bhgmn,bnhd->bmhgd", dscores, k_BNHD).flatten(2, 3)
    dk = torch.einsum("bhgmn,bmhgd->bnhd", dscores, q_BMHGD)
    dv = torch.einsum("bhgmn,bmhgd->bnhd", weights, dout_BMHGD)
    return dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype)


ABILITIES = Abilities(windows=True, masks=True)
PLAIN = Kernel("reference", _supports, _forward, _backward, takes_delta=True, abilities=ABILITIES)
"""As it is defined: where a table joins several documents, NaN of one reaches the others."""
KERNEL = keeps_nan_where_seen(PLAIN)
