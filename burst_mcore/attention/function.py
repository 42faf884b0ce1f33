"""BurstAttention, the autograd function of a call: its forward and its backward run the two passes.

`attend` makes a call; in a checkpointed function it saves, or reuses, the results of a suffix of the queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor

from burst_mcore.agreement.agreement import Agreed, Agreement
from burst_mcore.agreement.claims import Claim
from burst_mcore.attention.agree import agree_on_backward, agree_on_call, agreement_of
from burst_mcore.attention.backward import backward
from burst_mcore.attention.call import Attended, Call, Keys, Queries
from burst_mcore.attention.forward import Inputs, forward
from burst_mcore.attention.geometry.cuts import check_keep
from burst_mcore.attention.geometry.rows import gather
from burst_mcore.attention.kernels.table import taking_delta
from burst_mcore.attention.numerics.latent import Expansion, LatentBlocks
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.replay import (
    NOTHING_KEPT,
    CallId,
    Recompute,
    SavedSuffix,
    entered,
    forward_of_prefix,
    recompute_of,
    save,
)
from burst_mcore.attention.request import Request, Tensors
from burst_mcore.attention.resolve import call_of
from burst_mcore.attention.runtime.executor import Transport, transport_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import share_of_heads
from burst_mcore.packages import refuse_capture

ONCE = "burst_attention can be differentiated once: its gradients have no derivative"


class Saved(NamedTuple):
    """The tensors that autograd saves between forward and backward."""

    q: Tensor
    """q, k, v and ring_lse as on the ring: the caller's tensors and `lse`. Under head x ring they are the
    pooled rows of this member's heads."""
    k: Tensor
    v: Tensor
    ring_lse: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    """[B, H, S] of this rank's rows; empty under head x ring, unless `Call.lse_at_home`."""
    latent: Tensor | None
    """This rank's shard of the latent, with `up`."""
    up: Tensor | None


class Results(NamedTuple):
    """The results of a forward."""

    out: Tensor
    """[B, S, H, Dv]."""
    lse: Tensor
    """[B, H, S]; empty as in `Saved`."""
    max_logit: Tensor
    """[H]; empty unless requested."""
    saved: Saved
    record: Agreed
    suffix: SavedSuffix | None = None
    """The results of a suffix, which a checkpoint keeps."""


class BurstAttention(torch.autograd.Function):
    """The two passes of one call, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        topology: Topology,
        needs_gradient: bool,
        recompute: Recompute,
        *tensors: Tensor | None,
    ) -> tuple[Any, ...]:
        inputs = Tensors._make(tensors)
        results = run_forward(request, topology, inputs, needs_gradient, recompute)
        ctx.request, ctx.topology, ctx.record = request, topology, results.record
        ctx.save_for_backward(*results.saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results.max_logit)
        return results.out, results.lse, results.max_logit, results.suffix

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        saved = Saved(*ctx.saved_tensors)
        with torch.no_grad():
            gradients = run_backward(ctx.request, ctx.topology, ctx.record, saved, dout, dlse)
        if torch.is_grad_enabled():  # create_graph
            gradients = Underivable.apply(gradients, dout, *saved)  # type: ignore[no-untyped-call]
        return None, None, None, None, *gradients


class Underivable(torch.autograd.Function):
    """Gradients without a derivative: differentiating them raises, instead of giving zeros."""

    @staticmethod
    def forward(
        ctx: Any, gradients: tuple[Tensor | None, ...], *sources: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Never:
        raise RuntimeError(ONCE)


def attend(tensors: Tensors, request: Request, topology: Topology) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out [B, S, H, Dv], lse [B, H, S], max logits [H]); the last two are empty unless requested.

    In a checkpointed function a forward saves results of a suffix, and its recomputation reuses them.
    """
    needs_gradient = gradient_wanted(tensors)
    if not entered.in_checkpoint:
        return _applied(request, topology, needs_gradient, NOTHING_KEPT, *tensors)[:3]
    call_id = CallId(request, entered.layer, topology)
    agreement = agreement_of(topology)
    with agreement.refusing():
        recompute = recompute_of(call_id)
    out, lse, max_logit, suffix = _applied(request, topology, needs_gradient, recompute, *tensors)
    with agreement.refusing():
        for recording in entered.recordings:
            recording.record(call_id, recompute.suffix or suffix)
    return out, lse, max_logit


_applied: Callable[..., tuple[Any, ...]] = BurstAttention.apply


def gradient_wanted(tensors: Tensors) -> bool:
    """Return whether a backward may follow."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def run_forward(
    request: Request, topology: Topology, tensors: Tensors, needs_gradient: bool, recompute: Recompute
) -> Results:
    """Agree with the other ranks on a call, and run its forward."""
    agreement = agreement_of(topology)
    with agreement.refusing():
        if tensors.q.is_cuda:
            refuse_capture("burst_attention")
        if recompute.keep:
            check_keep(recompute.keep)
    call, agreed = agree_on_call(request, needs_gradient, recompute, agreement)
    tokens = agreed.lengths[call.rank]
    with _in_pass(agreement, tensors.q.device):
        if recompute.at_most:  # a collective: ranks without free memory join, too
            keeps = agreement.meet(Claim({"pass": "least of all"}, (int(recompute.keep * 2**30),))).lengths
            recompute = replace(recompute, keep=min(keeps) / 2**30)
        transport = transport_of(topology, call.route, request.config.max_ctas)
        transport.connect(Pass.FORWARD)
        if needs_gradient:
            transport.connect(call.direction)
        transport = transport.labelled(agreed.label)
        attended = _ring_forward(call, transport, tensors, recompute.suffix, tokens)
        results = _results(call, tensors, attended, agreed)
        if entered.in_checkpoint and recompute.suffix is None:
            results = results._replace(suffix=_suffix(request, call, attended, results, recompute))
    if not needs_gradient and not entered.in_checkpoint:
        agreement.settle()  # the error checks that a backward would settle
    return results


def _ring_forward(
    call: Call, transport: Transport, tensors: Tensors, suffix: SavedSuffix | None, tokens: int
) -> Attended:
    """Run a forward, of all queries or of the prefix before a saved suffix."""
    q, k, v, sinks, up = tensors
    expansion = None if up is None else _expansion(call, up)
    if expansion and not call.latent_rotates:
        k, v = expansion.expand(k, v)
    q, k, v = [_with_rows(x, call.rows) for x in (q, k, v)]
    inputs = Inputs(q, _keys(call, k, v, expansion), sinks)
    if suffix is None or not suffix.tensors:
        return forward(call, transport, inputs)
    return forward_of_prefix(call, transport, inputs, suffix, tokens)


def _keys(call: Call, k: Tensor, v: Tensor, expansion: Expansion | None) -> Keys:
    """Return the rotating key side: K and V, or the latent and the rope key."""
    if expansion is None or not call.latent_rotates:
        return Keys(k, v)
    return Keys(k, v, partial(LatentBlocks, expansion))


def _results(call: Call, tensors: Tensors, attended: Attended, record: Agreed) -> Results:
    """Return the results of this rank's tokens, without padding, and the tensors that backward needs."""
    tokens = record.lengths[call.rank]
    out = _owned(attended.out[:, :tokens] if tokens < call.rows else attended.out)
    nothing = attended.ring_lse.new_empty(0)
    lse = nothing if attended.lse is None else attended.lse
    lse = _owned(lse[..., :tokens] if tokens < call.rows else lse)
    max_logit = nothing if attended.max_logit is None else attended.max_logit
    on_ring = tensors.q, tensors.k, tensors.v, lse
    if call.route.heads > 1:
        on_ring = attended.q, attended.k, attended.v, attended.ring_lse
    latent = None if tensors.up is None else tensors.k
    saved = Saved(*on_ring, tensors.sinks, out, lse, latent, tensors.up)
    return Results(out, lse, max_logit, saved, record)


def _suffix(
    request: Request, call: Call, attended: Attended, results: Results, recompute: Recompute
) -> SavedSuffix:
    """Return the results that a checkpoint keeps: none, copies of a suffix, or all without copies."""
    if recompute.keep == 0:
        return SavedSuffix(0, [], copied=True)
    if recompute.keep == 1 and not recompute.at_most:
        tensors = [results.out, results.saved.ring_lse]
        tensors += [results.lse] if call.route.heads > 1 and call.lse_at_home else []
        tensors += [results.max_logit] if call.scores.max_logit else []
        return SavedSuffix(0, [x.detach() for x in tensors], copied=False)
    return save(request, call, recompute, attended, results.record.lengths[call.rank])


def run_backward(
    request: Request,
    topology: Topology,
    record: Agreed,
    saved: Saved,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Agree with the other ranks on a backward, and return the gradients of the `Tensors` of its call.

    With a gradient dL of lse: d lse_i / d S_ij = P_ij, so dS = P * (dP - D) + dL P = P * (dP - (D - dL)).
    """
    agreement = agreement_of(topology)
    with agreement.refusing():
        call = call_of(request, record.lengths)
        if dlse is not None:
            kernel, problem = request.config.kernel, call.problem
            call = call.variant("lse", lambda: {"kernel": taking_delta(kernel, problem)})
        transport = transport_of(topology, call.route, request.config.max_ctas)
    agreed = agree_on_backward(request, call, record, agreement, of_lse=dlse is not None)
    with _in_pass(agreement, saved.out.device):
        transport.connect(call.direction)
        transport = transport.labelled(agreed.label)
        dout = torch.zeros_like(saved.out) if dout is None else dout.contiguous()
        delta = row_delta(dout, saved.out)
        if dlse is not None:
            delta -= dlse
        dsinks = None if saved.sinks is None else _sinks_gradient(saved.sinks, saved.lse, delta)
        dq, dk, dv, dup = _ring_backward(call, transport, saved, dout, delta)
    return dq, dk, dv, dsinks, dup


def _ring_backward(
    call: Call, transport: Transport, saved: Saved, dout: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    tokens, latent, up = saved.out.shape[1], saved.latent, saved.up
    q, k, v, lse = saved[:4]
    expansion = None if up is None else _expansion(call, up)
    if call.route.heads == 1:
        if expansion and not call.latent_rotates:
            k, v = expansion.expand(k, v)
        q, k, v, lse = (_with_rows(x, call.rows) for x in (q, k, v, lse))
    dout, out, delta = (_with_rows(x, call.rows) for x in (dout, saved.out, delta))
    keys = _keys(call, k, v, expansion)
    gradients = backward(call, transport, Queries(q, dout, delta, lse), keys, out)
    dq, dk, dv = (gather(x, (range(tokens),)).contiguous() for x in gradients)
    if expansion is None:
        return dq, dk, dv, None
    if not call.latent_rotates:
        assert latent is not None
        dk, dv = (x.to(dk.dtype) for x in expansion.gradients(latent, dk, dv))
    return dq, dk, dv, expansion.weight_gradient()


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return -sum_i P_i,sink D_i. A sink is a key with a value of zero: dP = 0 in dS = P * (dP - D)."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _expansion(call: Call, up: Tensor) -> Expansion:
    """Return the up-projection of all heads, or of this member's heads if the latent rotates."""
    member, members = (call.member, call.route.heads) if call.latent_rotates else (0, 1)
    heads = share_of_heads(up.shape[0], member, members)
    return Expansion(up, heads, call.problem.value_dim)


def _owned(x: Tensor) -> Tensor:
    """Return x contiguous and, for autograd, not a view: callers may write to it."""
    x = x.contiguous()
    return x.detach() if x._is_view() else x


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """Return x padded with zeros to `rows` rows, in no tile; [B, S, H, D] has unit stride along D."""
    if x.dim() == 3:
        return torch.nn.functional.pad(x, (0, rows - x.shape[2])) if x.shape[2] < rows else x
    if x.shape[1] < rows:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))
    return x if x.stride(-1) == 1 else x.contiguous()


@contextlib.contextmanager
def _in_pass(agreement: Agreement, device: torch.device) -> Iterator[None]:
    """Run a pass with autocast off and the device current; after a failed pass the agreement bars calls."""
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(agreement.ring())
        if device.type == "cuda":  # Triton launches on the current device, not on that of its tensors
            contexts.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            contexts.enter_context(torch.autocast(device.type, enabled=False))
        yield
