"""Attention of one tile in plain torch, on any device: the definition that the other kernels are held to.

It stores all scores. Letters: B batch, M query rows, N key rows, H K/V heads, G query heads of a K/V head,
D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_mcore.attention.kernels.kernel import Kernel, Problem, RowGradients, Window
from burst_mcore.attention.merge import wide


def _supports(problem: Problem) -> str | None:
    return None if problem.dtype.is_floating_point else f"dtype {problem.dtype} is not floating point"


def _scores(
    q_BMHGD: Tensor, k_BNHD: Tensor, window: Window | None, mask: Tensor | None, scale: float
) -> Tensor:
    scores: Tensor = torch.einsum("bmhgd,bnhd->bhgmn", q_BMHGD, k_BNHD) * scale
    rows, columns = scores.shape[-2:]
    low, high = window or (None, None)
    ahead = torch.arange(columns, device=scores.device) - torch.arange(rows, device=scores.device)[:, None]
    if low is not None:
        scores.masked_fill_(ahead < low, -torch.inf)
    if high is not None:
        scores.masked_fill_(ahead > high, -torch.inf)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return scores


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    grouped: Tensor = x.to(wide(x.dtype)).unflatten(2, (kv_heads, -1))
    return grouped


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    window = (None, 0) if causal else window
    k_BNHD, v_BNHD = k.to(wide(k.dtype)), v.to(wide(v.dtype))
    scores = _scores(_grouped(q, k.shape[2]), k_BNHD, window, mask, scale)
    lse_BHGM = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse_BHGM.masked_fill(lse_BHGM == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights, v_BNHD).flatten(2, 3)
    return out.to(q.dtype).contiguous(), lse_BHGM.flatten(1, 2)


def _backward(
    x: RowGradients,
    *,
    causal: bool,
    scale: float,
    window: Window | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    window = (None, 0) if causal else window
    heads, dtype = x.k.shape[2], wide(x.k.dtype)
    q_BMHGD, dout_BMHGD = _grouped(x.q, heads), _grouped(x.dout, heads)
    k_BNHD, v_BNHD = x.k.to(dtype), x.v.to(dtype)
    lse_BHGM, delta_BHGM = (rows.unflatten(1, (heads, -1)) for rows in (x.lse, x.delta))
    weights = torch.exp(_scores(q_BMHGD, k_BNHD, window, mask, scale) - lse_BHGM[..., None])
    weights.nan_to_num_(nan=0.0)  # rows that see nothing: (-inf) - (-inf)
    dweights = torch.einsum("bmhgd,bnhd->bhgmn", dout_BMHGD, v_BNHD)
    dscores = weights * (dweights - delta_BHGM[..., None]) * scale
    dq = torch.einsum("bhgmn,bnhd->bmhgd", dscores, k_BNHD).flatten(2, 3)
    dk = torch.einsum("bhgmn,bmhgd->bnhd", dscores, q_BMHGD)
    dv = torch.einsum("bhgmn,bmhgd->bnhd", weights, dout_BMHGD)
    return dq.to(x.q.dtype), dk.to(x.k.dtype), dv.to(x.v.dtype)


KERNEL = Kernel("reference", _supports, _forward, _backward, takes_delta=True, windows=True, masks=True)
