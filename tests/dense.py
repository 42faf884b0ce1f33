"""Dense attention over the whole sequence, by definition, in float64; and what errors are measured by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore import Mask
from burst_mcore.attention.kernels.kernel import Kernel, RowGradients


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Result(NamedTuple):
    """[batch, sequence, heads, head_dim], lse [batch, sequence, heads]."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def problem(
    seed: int,
    n: int,
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    dout_scale: float = 1.0,
) -> Problem:
    """Random global tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(h: int, d: int) -> Tensor:
        return torch.randn(batch, n, h, d, generator=generator, dtype=torch.float64).to(dtype)

    value_dim = value_dim or head_dim
    q, k, v = draw(heads, head_dim), draw(kv_heads, head_dim), draw(kv_heads, value_dim)
    return Problem(q, k, v, draw(heads, value_dim) * dout_scale)


def dense(p: Problem, mask: Mask, scale: float | None = None, dlse: Tensor | None = None) -> Result:
    """float64 attention and gradients through torch.autograd."""
    q, k, v = (x.double().detach().requires_grad_() for x in (p.q, p.k, p.v))
    group, at = q.shape[2] // k.shape[2], torch.arange(q.shape[1])
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(group, 2))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = mask.allows(at, at)
    blind = ~seen.any(1)
    scores = scores.masked_fill(~(seen | blind[:, None]), -torch.inf)
    weights = scores.softmax(-1).masked_fill(blind[:, None], 0.0)  # a query that sees nothing gets zeros
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v.repeat_interleave(group, 2))
    lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf).transpose(1, 2)
    loss = (out * p.dout.double()).sum() + (
        0 if dlse is None else (lse.masked_fill(blind[:, None], 0.0) * dlse.double()).sum()
    )
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v)))


def single_kernel(p: Problem, kernel: Kernel, mask: Mask) -> Result:
    """The same kernel on one device, given its own out: the bar that a ring is held to."""
    at = torch.arange(p.q.shape[1])
    plain = mask in (Mask.causal(), Mask.full())
    seen = {"causal": mask == Mask.causal(), "mask": None if plain else mask.allows(at, at)}
    scale = p.q.shape[-1] ** -0.5
    out, lse = kernel.forward(p.q, p.k, p.v, scale=scale, **seen)
    wide = torch.promote_types(out.dtype, torch.float32)
    delta = (p.dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).contiguous()
    row = RowGradients(p.dout, p.q, p.k, p.v, out, lse, delta)
    return Result(out, lse.transpose(1, 2), *kernel.backward(row, scale=scale, **seen))


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN and infinity (but the -inf of lse) are infinite errors."""
    if not torch.equal(got == -torch.inf, want == -torch.inf):
        return float("inf")
    got, want = (x.masked_fill(x == -torch.inf, 0.0) for x in (got, want))
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return difference.item() if torch.isfinite(difference) else float("inf")


def assert_as_exact_as(got: Result, bar: Result, want: Result, times: float = 2.0) -> None:
    """Each error at most `times` that of `bar`, or of half an ulp where `bar` is closer by luck."""
    for name in Result._fields:
        g, b, w = getattr(got, name), getattr(bar, name), getattr(want, name)
        if w.norm() < 1e-10:  # such as dq where every query sees one key: there is nothing to be relative to
            assert g.double().norm() <= torch.finfo(g.dtype).eps * g.numel() ** 0.5, f"{name} is not 0"
            continue
        allowed = times * max(error(b, w), torch.finfo(g.dtype).eps / 2)
        assert error(g, w) <= allowed, f"{name}: {error(g, w):.3e} > {allowed:.3e} = {times} x the kernel's"
