"""Dense attention over the whole sequence, by definition, in float64; and what errors are measured by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore import Mask
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores


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


ALTERNATING = -1000.0, 1000.0
"""Scores of both signs, whose mean is 0."""


def share_score(p: Problem, score: float | tuple[float, float]) -> Problem:
    """The problem with one channel in which all queries have 1 and all keys a number: massive activations.

    Of two scores every other key has the second.
    """
    q, k = p.q.clone(), p.k.clone()
    even, odd = score if isinstance(score, tuple) else (score, score)
    q[..., 0], k[:, ::2, :, 0], k[:, 1::2, :, 0] = 1, even, odd
    k[..., 0] *= p.q.shape[-1] ** 0.5
    return p._replace(q=q, k=k)


def dense(
    p: Problem,
    mask: Mask,
    scale: float | None = None,
    dlse: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Result:
    """float64 attention and gradients through torch.autograd; `sinks` gets its .grad, if it wants one."""
    q, k, v = (x.double().detach().requires_grad_() for x in (p.q, p.k, p.v))
    leaf_v, group, at = v, q.shape[2] // k.shape[2], torch.arange(q.shape[1])
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(group, 2))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    seen = mask.allows(at, at)
    blind = ~seen.any(1) & (sinks is None)
    scores = scores.masked_fill(~(seen | blind[:, None]), -torch.inf)
    if sinks is not None:  # one more key, of no value
        column = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, column], -1), torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1))
    weights = scores.softmax(-1).masked_fill(blind[:, None], 0.0)  # a query that sees nothing gets zeros
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v.repeat_interleave(group, 2))
    lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf).transpose(1, 2)
    loss = (out * p.dout.double()).sum() + (
        0 if dlse is None else (lse.masked_fill(blind[:, None], 0.0) * dlse.double()).sum()
    )
    inputs = (q, k, leaf_v) if sinks is None or not sinks.requires_grad else (q, k, leaf_v, sinks)
    dq, dk, dv, *dsinks = torch.autograd.grad(loss, inputs)
    if dsinks:
        sinks.grad = dsinks[0]
    return Result(out.detach(), lse.detach(), dq, dk, dv)


def single_kernel(p: Problem, kernel: Kernel, mask: Mask) -> Result:
    """The same kernel on one device, given its own out: the bar that a ring is held to."""
    pattern, scores = pattern_of(mask, p.q.shape[1]), Scores(p.q.shape[-1] ** -0.5)
    out, lse = kernel.forward(p.q, p.k, p.v, pattern, scores)
    wide = torch.promote_types(out.dtype, torch.float32)
    delta = (p.dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).contiguous()
    row = BackwardInputs(p.dout, p.q, p.k, p.v, out, lse.to(wide), delta)
    return Result(out, lse.transpose(1, 2), *kernel.backward(row, pattern, scores))


def pattern_of(mask: Mask, n: int) -> Pattern:
    """The mask over n tokens as one tile."""
    if mask in (Mask.causal(), Mask.full()):
        return Pattern((n, n), high=0 if mask == Mask.causal() else None)
    at = torch.arange(n)
    return Pattern.from_table(mask.allows(at, at))


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN and infinity (but the -inf of lse) are infinite errors."""
    if not torch.equal(got == -torch.inf, want == -torch.inf):
        return float("inf")
    got, want = (x.masked_fill(x == -torch.inf, 0.0) for x in (got, want))
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return difference.item() if torch.isfinite(difference) else float("inf")


def sinks_terms(p: Problem, want: Result, sinks: Tensor, dlse: Tensor | None = None) -> Tensor:
    """[H]: the sum over all rows of |P D|, of which the sum of P D is the gradient of a sink."""
    delta = (p.dout.double() * want.out.double()).sum(-1) - (0 if dlse is None else dlse.double())
    return (torch.exp(sinks.double() - want.lse.double()) * delta).abs().sum((0, 1))


def assert_sinks_as_exact_as(got: Tensor, bar: Tensor, want: Tensor, terms: Tensor) -> None:
    """Each sink's error at most twice that of `bar`, or a rounding of `terms`, where `bar` is closer by luck.

    The gradient is a sum in which terms cancel: it was up to 13,700 times smaller than they are. Roundings of
    the terms stay, on one device as on many, so none of the two can be held to a rounding of the sum.
    """
    allowed = 2 * torch.maximum((bar.double() - want).abs(), torch.finfo(got.dtype).eps / 2 * terms)
    worst = ((got.double() - want).abs() / allowed).nan_to_num(torch.inf).max()
    assert worst <= 1, f"a sink's gradient is {worst:.2f} times as inexact as allowed: {got}, {want}"


def assert_as_exact_as(
    got: Result, bar: Result, want: Result, times: float = 2.0, roundings: int = 1
) -> None:
    """Each error at most `times` that of `bar`, or of `roundings`, of half an ulp each, if `bar` has luck."""
    for name in Result._fields:
        g, b, w = getattr(got, name), getattr(bar, name), getattr(want, name)
        if w.norm() < 1e-10:  # such as dq where every query sees one key: there is nothing to be relative to
            # D and dP are rounded apart: torch's kernel leaves 0.92 ulp an element of such a gradient.
            allowed = times * max(b.double().norm().item(), torch.finfo(g.dtype).eps * g.numel() ** 0.5)
            assert g.double().norm() <= allowed, f"{name} is not 0: {g.double().norm()} > {allowed}"
            continue
        allowed = times * max(error(b, w), roundings * torch.finfo(g.dtype).eps / 2)
        assert error(g, w) <= allowed, f"{name}: {error(g, w):.3e} > {allowed:.3e} = {times} x the kernel's"
