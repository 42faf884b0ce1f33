"""The torch operators of burst_attention: forward and backward, their shapes for tracing, their autograd.

Only this file packs and unpacks the structures of `schema`, and hands tensors to the two passes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import unset_fake_temporarily

from burst_mcore.attention.backward import backward
from burst_mcore.attention.call import Attended, Call, Keys, Queries
from burst_mcore.attention.forward import Inputs, forward, forward_of_head, tail_of
from burst_mcore.attention.geometry.rows import gather
from burst_mcore.attention.kernels.table import taking_delta
from burst_mcore.attention.numerics.latent import Expansion
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.operator.agree import (
    agree_on_backward,
    agree_on_call,
    agreement_of,
    in_ring,
    passes_of,
    refusing,
)
from burst_mcore.attention.operator.schema import (
    BackwardArgs,
    BackwardResults,
    ForwardArgs,
    ForwardResults,
    Saved,
)
from burst_mcore.attention.prepare import call_of
from burst_mcore.attention.recompute.cuts import check_keep, cut_for
from burst_mcore.attention.recompute.replay import CallId, entered, in_checkpoint
from burst_mcore.attention.request import (
    Options,
    Request,
    options_of,
    request_of,
    shard_of,
    topology_of,
    validate,
)
from burst_mcore.attention.runtime import record as records
from burst_mcore.attention.runtime.executor import transport_of
from burst_mcore.attention.runtime.head_exchange import pooled_like
from burst_mcore.attention.runtime.record import CallRecord
from burst_mcore.attention.schedule.heads import share_of_heads
from burst_mcore.capture import refuse_capture
from burst_mcore.dtypes import wide

_PLAIN = {Tensor, torch.nn.Parameter, type(None), str, bool, int, float, list}


def _operator(
    name: str, takes: type[tuple[Any, ...]], returns: type[tuple[Any, ...]]
) -> Callable[[Callable[[Any], tuple[Any, ...]]], CustomOpDef]:
    """Make an operator of a function from one NamedTuple to another; its schema is their fields."""

    def define(function: Callable[[Any], tuple[Any, ...]]) -> CustomOpDef:
        def flat(*values: Any) -> tuple[Any, ...]:
            return tuple(function(takes(*values)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        fields = get_type_hints(takes).items()
        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(field, kind, annotation=annotation) for field, annotation in fields],
            return_annotation=tuple[tuple(get_type_hints(returns).values())],  # type: ignore[misc]
        )
        return torch.library.custom_op(
            f"burst_mcore::{name}", flat, mutates_args=(), tags=torch.Tag.cudagraph_unsafe
        )

    return define


def _forward(args: ForwardArgs, request: Request | None = None) -> ForwardResults:
    """Run a forward; request: what `validate` made of the arguments, if it has seen them."""
    q, k, v, sinks = args.q, args.k, args.v, args.sinks
    topology = topology_of(args.options)
    agreement = agreement_of(topology)
    with refusing(agreement):
        if q.is_cuda:
            refuse_capture("burst_attention")
        options = options_of(args.options)
        request = request or validate(q, k, v, options, sinks=sinks, up=args.up)
        if args.keep:
            check_keep(args.keep)
        for run in entered.followers:
            run.follow(CallId(request.shard, entered.layer, options.told, request.sinks))
    call, agreed, lengths = agree_on_call(args, request, agreement, topology)
    tokens = lengths[call.rank]
    with in_ring(agreement), _without_autocast(q.device), _on(q.device):
        if agreement is not None and args.at_most:  # a rank on which nothing fits meets the others, too
            args = args._replace(keep=agreement.least(args.keep))
        cut = _cut(args, request, call) if args.keep and args.saves else args.cut
        transport = transport_of(topology, call.route, request.config.max_ctas)
        for pass_ in passes_of(args, call):
            transport.connect(pass_)
        transport = transport.labelled(agreed.label) if agreement else transport
        expansion = None if args.up is None else _expansion(call, args.up)
        if expansion and not call.latent_travels:
            k, v = expansion.expand(k, v)
        q, k, v = _with_rows(q, call.rows), _with_rows(k, call.rows), _with_rows(v, call.rows)
        inputs = Inputs(q, k, v, sinks, expansion if call.latent_travels else None)
        if args.tail:
            attended = forward_of_head(call, transport, inputs, cut=cut, tail=args.tail, tokens=tokens)
        else:
            attended = forward(call, transport, inputs)
        tail = tail_of(call, cut, attended, tokens) if args.keep and args.saves else []
    if agreement is not None and not args.needs_gradient and not in_checkpoint():
        agreement.settle()  # no backward will
    out, lse, max_logit = [
        attended.ring_lse.new_empty(0) if x is None else x
        for x in (attended.out, attended.lse, attended.max_logit)
    ]
    return ForwardResults(
        out=_owned(out if tokens == call.rows else out[:, :tokens]),
        lse=_owned(lse if tokens == call.rows else lse[..., :tokens]),
        on_ring=[attended.q, attended.k, attended.v, attended.ring_lse] if call.route.heads > 1 else [],
        record=records.pack(CallRecord(agreed.number, cut, lengths), q.device),
        tail=tail,
        max_logit=max_logit,
    )


attention_forward = _operator("attention_forward", ForwardArgs, ForwardResults)(_forward)


class BurstAttention(torch.autograd.Function):
    """The operator without torch's dispatcher, whose way to Python takes longer than all else of a call."""

    @staticmethod
    def forward(ctx: Any, request: Request, args: ForwardArgs, *tensors: Tensor | None) -> tuple[Any, ...]:
        results = _forward(args, request)  # `tensors` are those in `args` of which autograd has to know
        ctx.request = request
        _save(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return None, None, *_differentiated(ctx, *gradients)


def attend(args: ForwardArgs, request: Request) -> ForwardResults:
    """Attend with arguments of which `validate` made a request; the operator would check them once more."""
    if not _unwatched(args):
        return ForwardResults(*attention_forward(*args))
    if not args.needs_gradient:
        return _forward(args, request)
    tensors = args.q, args.k, args.v, args.sinks, args.up
    return ForwardResults(*BurstAttention.apply(request, args, *tensors))  # type: ignore[no-untyped-call]


def _unwatched(args: ForwardArgs | BackwardArgs) -> bool:
    """Return whether nobody asks for operators: no mode, no transform, no trace, no subclass of tensors."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None
        and _PLAIN.issuperset(map(type, args))
    )


def _owned(x: Tensor) -> Tensor:
    """Return x, contiguous, as a tensor that is no view for autograd: callers may write to it."""
    x = x.contiguous()
    return x.detach() if x._is_view() else x


def _expansion(call: Call, up: Tensor) -> Expansion:
    """Return the up-projection that this rank applies: of all heads, or its own if the latent travels."""
    member, members = (call.member, call.route.heads) if call.latent_travels else (0, 1)
    heads = share_of_heads(up.shape[0], member, members)
    return Expansion(up, heads, call.problem.value_dim)


def _cut(args: ForwardArgs, request: Request, call: Call) -> int:
    """Return the global position from which on results are saved."""
    layout, size = request.layout, request.ranks.size
    return cut_for(args.keep, layout, request.mask, call.plan.n, size, at_most=args.at_most).position


@attention_forward.register_fake
def _(*values: Any) -> tuple[Any, ...]:
    """Return the shapes of the results; ranks of other lengths pool and save other numbers of rows."""
    args = ForwardArgs(*values)
    q, k, v = args.q, args.k, args.v
    options, dtype = options_of(args.options), wide(q.dtype)
    topology, config = topology_of(args.options), options.config
    out = q.new_empty((*q.shape[:3], args.value_dim))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    record = q.new_empty(2 + topology.size, dtype=torch.int64)  # as `records.pack` makes it
    max_logit = q.new_empty(q.shape[2] if options.return_max_logit else 0, dtype=dtype)
    if config.head_parallel == 1 and not args.saves:
        return tuple(ForwardResults(out, lse, [], record, [], max_logit))
    with refusing(agreement_of(topology)), unset_fake_temporarily():  # plans are cached: of real tensors
        latent = None if args.up is None else (int(k.shape[3]), int(v.shape[3]))
        kv_heads = int(k.shape[2] if latent is None else q.shape[2])
        shape = tuple(int(size) for size in q.shape)
        shard = shard_of(shape, kv_heads, int(args.value_dim), q.dtype, config.grad_dtype, latent)
        request = request_of(shard, q.device.type, options, sinks=args.sinks is not None)
        try:
            call = call_of(request, (shard.tokens,) * topology.size)
        except ValueError as error:
            words = f"a compiled call here takes for granted that every rank holds {shard.tokens} tokens"
            raise ValueError(f"{words}: {error}") from error
        cut = _cut(args, request, call) if args.saves else call.plan.n
    on_ring, ring_lse = [], lse
    if call.route.heads > 1 and args.up is not None and not call.latent_travels:
        k, v = (q.new_empty((*q.shape[:3], width)) for width in (q.shape[-1], args.value_dim))
    if call.route.heads > 1:
        shapes = [pooled_like(x, call.head_group) for x in (q, k, v)]
        ring_lse = q.new_empty((q.shape[0], shapes[0][2], shapes[0][1]), dtype=dtype)
        on_ring = [*(q.new_empty(shape) for shape in shapes), ring_lse]
    tail = []
    if args.saves:
        at_home = lse if call.lse_at_home else None
        attended = Attended(out, at_home, q, k, v, ring_lse, max_logit if options.return_max_logit else None)
        tail = tail_of(call, cut, attended, shard.tokens)
    if call.route.heads > 1 and not call.lse_at_home:
        lse = q.new_empty(0, dtype=dtype)
    return tuple(ForwardResults(out, lse, on_ring, record, tail, max_logit))


def _backward(args: BackwardArgs, request: Request | None = None) -> BackwardResults:
    """Run a backward; request: that of its forward, if it is known."""
    out, lse, tokens = args.out, args.lse, args.out.shape[1]
    topology = topology_of(args.options)
    agreement = agreement_of(topology)
    with refusing(agreement):
        options, record = options_of(args.options), records.unpack(args.record)
        config = options.config
        request = request or _request_of(args, options)
        call = call_of(request, record.lengths)
        if args.dlse is not None:
            call = replace(call, kernel=taking_delta(config.kernel, call.problem))
        transport = transport_of(topology, call.route, config.max_ctas)
    agreed = agree_on_backward(args, request, call, record, agreement, transport)
    with in_ring(agreement), _without_autocast(out.device), _on(out.device):
        transport.connect(call.direction)
        transport = transport.labelled(agreed.label) if agreement else transport
        dout = args.dout.contiguous()
        delta = row_delta(dout, out)
        if args.dlse is not None:  # d lse / d scores = P, which enters dS as -D does
            delta -= args.dlse
        dsinks = out.new_empty(0) if args.sinks is None else _sinks_gradient(args.sinks, lse, delta)
        q, k, v, ring_lse = args.q, args.k, args.v, args.ring_lse
        expansion = None if args.up is None else _expansion(call, args.up)
        if call.route.heads == 1:
            if expansion and not call.latent_travels:
                k, v = expansion.expand(k, v)
            q, k, v, ring_lse = (_with_rows(x, call.rows) for x in (q, k, v, ring_lse))
        dout, out, delta = (_with_rows(x, call.rows) for x in (dout, out, delta))
        queries, travelling = Queries(q, dout, delta, ring_lse), expansion if call.latent_travels else None
        gradients = backward(call, transport, queries, Keys(k, v), out, travelling)
        dq, dk, dv = (gather(x, (range(tokens),)).contiguous() for x in gradients)
        dup = out.new_empty(0)
        if expansion:
            if not call.latent_travels:
                assert args.latent is not None
                dk, dv = (x.to(dk.dtype) for x in expansion.gradients(args.latent, dk, dv))
            dup = expansion.weight_gradient()
    return BackwardResults(dq, dk, dv, dsinks, dup)


attention_backward = _operator("attention_backward", BackwardArgs, BackwardResults)(_backward)


def _request_of(args: BackwardArgs, options: Options) -> Request:
    """Return the request of the forward that a backward belongs to."""
    out, latent, kv_heads = args.out, None, args.kv_heads
    shape = (*out.shape[:3], args.q.shape[-1])
    if args.up is not None:
        latent, kv_heads = (args.up.shape[1], shape[3] + out.shape[3] - args.up.shape[2]), shape[2]
    shard = shard_of(shape, kv_heads, out.shape[-1], out.dtype, options.config.grad_dtype, latent)
    return request_of(shard, out.device.type, options, sinks=args.sinks is not None)


@attention_backward.register_fake
def _(*values: Any) -> tuple[Any, ...]:
    args = BackwardArgs(*values)
    shape, dim = args.out.shape, args.q.shape[-1]
    of_key, of_value = dim, shape[3]
    if args.up is not None:
        of_key, of_value = args.up.shape[1], dim + shape[3] - args.up.shape[2]
    dq = args.q.new_empty((*shape[:3], dim))
    dk = args.q.new_empty((*shape[:2], args.kv_heads, of_key))
    dv = args.q.new_empty((*shape[:2], args.kv_heads, of_value))
    dsinks, dup = (args.out.new_empty(0) if x is None else torch.empty_like(x) for x in (args.sinks, args.up))
    return tuple(BackwardResults(dq, dk, dv, dsinks, dup))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Save the tensors that backward needs, and keep the values of the handles alive."""
    args, results = ForwardArgs(*inputs), ForwardResults(*output)
    ctx.options, ctx.kv_heads, ctx.tail = args.options, args.k.shape[2], len(args.tail)
    ctx.record = records.known(results.record)
    ctx.alive = options_of(args.options), topology_of(args.options)
    ctx.save_for_backward(*Saved.of(args, results))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    dq, dk, dv, dsinks, dup = _differentiated(ctx, *gradients)
    by_name = {"q": dq, "k": dk, "v": dv, "sinks": dsinks, "up": dup, "tail": [None] * ctx.tail}
    return tuple(by_name.get(name) for name in ForwardArgs._fields)


def _differentiated(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    """Return the gradients of q, k, v, sinks and up."""
    saved = Saved(*ctx.saved_tensors)
    if ctx.record is not None and records.has_memory(saved.record):  # a hook may have moved the tensor
        records.remember(saved.record, ctx.record)
    args = BackwardArgs(
        dout=torch.zeros_like(saved.out) if dout is None else dout,
        dlse=dlse,
        kv_heads=ctx.kv_heads,
        options=ctx.options,
        **saved._asdict(),
    )
    if _unwatched(args) and not torch.is_grad_enabled():
        results = _backward(args, vars(ctx).get("request"))
    else:  # the operator refuses a second derivative
        results = BackwardResults(*attention_backward(*args))
    dsinks = None if saved.sinks is None else results.dsinks
    dup = None if saved.up is None else results.dup
    return results.dq, results.dk, results.dv, dsinks, dup


def _no_second_derivative(ctx: Any, *gradients: Tensor | None) -> None:
    raise RuntimeError("burst_attention can be differentiated once: its gradients have no derivative")


attention_forward.register_autograd(_gradients, setup_context=_save)
attention_backward.register_autograd(_no_second_derivative)


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return -sum of P_sink D: a sink is a key with a value of zero, so its dP is 0."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off, where it is on."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else contextlib.nullcontext()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device current: Triton launches on the current device, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x with so many rows, zeros at its end, which are in no tile; [B, S, H, D] with unit stride along D."""
    if x.dim() == 3:
        return torch.nn.functional.pad(x, (0, rows - x.shape[2])) if x.shape[2] < rows else x
    if x.shape[1] < rows:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))
    return x if x.stride(-1) == 1 else x.contiguous()
