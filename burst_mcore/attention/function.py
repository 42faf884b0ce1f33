"""burst_attention: the public function, and the autograd node around the two passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from burst_mcore.attention.arguments import (
    Asked,
    Shape,
    asked_of,
    call_for,
    checked,
    signature,
    signature_of_call,
)
from burst_mcore.attention.autotune.choose import Ranks, route_for, why_not_placed
from burst_mcore.attention.front import behind, forward_of_front
from burst_mcore.attention.kernels.table import taking_delta
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.passes import Attended, Call, Keys, Queries, backward, forward
from burst_mcore.attention.prepare import await_plan, remember
from burst_mcore.attention.recompute.cuts import check_keep, cut_for
from burst_mcore.attention.recompute.replay import Kept, Made, in_checkpoint, layer, recordings, replays
from burst_mcore.attention.runtime.agreement import Agreement, Signature, agreement
from burst_mcore.attention.runtime.executor import ProcessGroups
from burst_mcore.attention.runtime.head_exchange import pooled_like
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.route import PASSES
from burst_mcore.config import BurstConfig
from burst_mcore.dtypes import wide
from burst_mcore.handles import find, known
from burst_mcore.mask import Mask


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    topology: Topology,
    mask: Mask,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: BurstConfig | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is sharded over the ranks of `topology` (BurstAttention).

    Every rank of the ring calls it with its own shard. Equals, for the whole sequence,
    softmax(softmax_scale q k^T + mask) v, each group of heads / kv_heads query heads sharing a K/V head.

    Args:
        q: [batch, local sequence, heads, head_dim]; float32, bfloat16, float16 (float64 for tests). A rank
            holds what `shard` deals it: fewer tokens than others, or none, where the length does not divide.
        k: [batch, local sequence, kv_heads, head_dim]; kv_heads divides heads and is never repeated on the
            ring. Same dtype and device as q.
        v: [batch, local sequence, kv_heads, value_dim].
        topology: the ring. It has no default: attention over one rank is `Topology.single()`.
        mask: over global positions; which positions a rank holds is up to `config.layout`. A query that may
            attend to nothing gets zeros.
        softmax_scale: default 1 / sqrt(head_dim).
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [heads], floating point: a logit of each head that takes part in the softmax of every query and
            brings no value. Its gradient is that of this rank's queries: sum it over the ranks, as gradients
            of weights are. Every rank gives the same.
        config: default `BurstConfig()`.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        out [batch, local sequence, heads, value_dim] in the dtype of q, and with `return_lse` also lse
        [batch, local sequence, heads] in float32 (float64 for float64 inputs), -inf where a query sees no
        key, nor has a sink. It is differentiable, on all ranks or none: kernels that do not take D itself
        then work on 8 more head columns in backward.

    Raises:
        ValueError: before any communication if this rank's arguments are not legal; after an exchange of a
            few bytes if another rank's are not, or differ from this rank's, or if the layout or the mask do
            not go with the length of the global sequence, which is known only then.
        RuntimeError: a rank of the ring has gone; says at which step and hop. After any error in mid-ring
            later calls on the same process group are refused, on all ranks.
    """
    config = BurstConfig() if config is None else config
    tensors = (q, k, v, sinks)
    if not torch.compiler.is_compiling():  # a compiled call is checked when it runs
        _check(topology, mask, softmax_scale, softcap, config, return_lse, tensors)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    given = topology.handle, mask.handle, config.handle, softmax_scale, softcap, bool(return_lse), wanted
    if in_checkpoint():
        out, lse = _checkpointed(topology, mask, config, *given[3:], tensors)
    else:
        out, lse, *_ = attention_forward(*tensors, [], 0, 0.0, False, *given)
    return (out, lse.transpose(1, 2)) if return_lse else out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _checkpointed(
    topology: Topology,
    mask: Mask,
    config: BurstConfig,
    softmax_scale: Scale,
    softcap: Scale,
    return_lse: bool,
    wanted: bool,
    tensors: Tensors,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that is made in a checkpointed function.

    Not compiled: a forward that keeps something and its recomputation would be two graphs, and torch matches
    what they save by its place.
    """
    q, k, v, sinks = tensors
    options = softmax_scale, softcap, return_lse, wanted
    given = topology.handle, mask.handle, config.handle, *options
    made = Made(
        q=tuple(q.shape),
        kv_heads=k.shape[2],
        value_dim=v.shape[-1],
        dtype=q.dtype,
        layer=layer(),
        topology=topology.handle,
        mask=mask.handle,
        config=config.handle,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks is not None,
        return_lse=return_lse,
    )
    peers = agreement(topology)
    with _refusing(peers):
        found = [recomputation.replay(made) for recomputation in replays()]
        kept = next((kept for kept in found if kept is not None), None)
        share = max([(0.0, False), *(each.share(made) for each in recordings())])
    if kept is not None:
        out, lse, *_ = attention_forward(*tensors, kept.tensors, kept.at, 0.0, False, *given)
    else:
        keep, at_most = share
        uncopied = keep == 1 and not at_most  # all: as it is, without a copy
        share = (0.0, False) if uncopied else share
        out, lse, shared, agreed, pieces = attention_forward(*tensors, [], 0, *share, *given)
        if uncopied:
            home = [lse] if shared and (return_lse or sinks is not None) else []
            pieces = [out, shared[3] if shared else lse, *home]
        kept = Kept(int(agreed[1]), [x.detach() for x in pieces], copied=not uncopied)
    with _refusing(peers):
        for forward_of in recordings():
            forward_of.record(made, kept)
    return out, lse


Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
Scale = float | None


def _check(
    topology: Topology,
    mask: Mask,
    softmax_scale: Scale,
    softcap: Scale,
    config: BurstConfig,
    return_lse: bool,
    tensors: Tensors,
) -> None:
    """Refuse what is not legal, and tell the other ranks; what is legal can be found by its handle."""
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology must be a Topology, got {topology!r}: Topology.from_group(group) or Topology.single()"
        )
    with _refusing(agreement(topology)):
        q, k, v, sinks = tensors
        checked(q, k, v, topology, mask, softmax_scale, softcap, sinks, config, return_lse)
        for value in (topology, mask, config):
            known(value)


@contextlib.contextmanager
def _refusing(peers: Agreement | None) -> Iterator[None]:
    """If this block raises, tell the other ranks, so that none of them waits."""
    try:
        yield
    except Exception as error:
        if peers is not None:
            peers.refuse(error)
        raise


def _agreed(asked: Asked, peers: Agreement | None, sign: Signature) -> tuple[Call, int, list[int]]:
    """The call that all ranks make, its number, and how many tokens each rank holds."""
    rows, size = asked.shard.tokens, asked.topology.size
    if peers is None:
        await_plan(asked.mask)
        return _remembered(asked, call_for(asked, [rows])), 0, [rows]
    await_plan(asked.mask)
    call, problem, details = None, None, {}
    try:  # as it is if all ranks hold as many tokens
        call = call_for(asked, [rows] * size)
        details = signature_of_call(call)
    except ValueError as error:  # it may be legal with what the others hold
        problem, details = error, {"problem": str(error)}
    except Exception as error:
        peers.refuse(error)
        raise
    number, lengths = peers.meet({"pass": "forward", **sign}, details, rows)
    if lengths is not None:
        try:
            call = call_for(asked, lengths)
            details = signature_of_call(call)
        except Exception as error:  # perhaps of this rank alone: what kernels there are is its own
            peers.refuse(error)
            raise
        peers.agree({"pass": "forward, lengths known", **sign, **details})
    elif problem is not None:
        raise problem
    assert call is not None
    return _remembered(asked, call), number, lengths or [rows] * size


def _remembered(asked: Asked, call: Call) -> Call:
    """The call, of which `prepare` was told: once for each plan and kind of layer, which may share a plan."""
    kind = "remembered", asked.shard, asked.config
    if kind not in call.plan.kept:
        call.plan.kept[kind] = True
        remember(asked)
    return call


def connect(topology: Topology, config: BurstConfig) -> None:
    """Make the communicators that calls with `config` will use, now instead of in the first of them.

    Collective over the ring; on gloo there is nothing to make. What is "auto" is known only in a call.

    Raises:
        ValueError: so many ranks cannot share heads, whatever the heads.
    """
    if topology.size == 1:
        return
    degree = config.head_parallel if isinstance(config.head_parallel, int) else 1
    ranks = Ranks(topology.size, topology.intra_size)
    why_not = why_not_placed(degree, ranks)
    if why_not is not None:
        raise ValueError(
            f"head_parallel={degree} is not legal with {ranks.size} ranks, {ranks.intra} a node: {why_not}"
        )
    for ring in ("double", "direct") if config.ring == "auto" else (config.ring,):
        transport = ProcessGroups(topology, route_for(degree, ranks, ring=ring, overlap=config.overlap))
        for name in PASSES:
            transport.connect(name)


@torch.library.custom_op("burst_mcore::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    kept: list[Tensor],
    at: int,
    keep: float,
    at_most: bool,
    topology: str,
    mask: str,
    config: str,
    softmax_scale: float | None,
    softcap: float | None,
    return_lse: bool,
    wanted: bool,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor, list[Tensor]]:
    """`burst_attention` as an operator: topology, mask and config are handles.

    kept, at: in a recomputation, what the forward kept, from that position on. keep, at_most: the share of
    the sequence whose results are to be returned last (`segments.cut_for`; of at_most, the least of all
    ranks). wanted: whether a backward will follow.

    Returns out, lse [B, H, S], and for the backward q, k, v and lse as they are on the ring, if that is not
    as they came, and what the ranks agreed on (int64, on the CPU); and what is kept: `recompute.Kept`.
    """
    ring = find(topology)
    peers = agreement(ring)
    with _refusing(peers):
        options = softmax_scale, softcap, sinks, find(config), return_lse
        asked = checked(q, k, v, ring, find(mask), *options)
        sign = {**signature(asked, wanted), **_of_segments(kept, at, check_keep(keep), at_most)}
    call, number, lengths = _agreed(asked, peers, sign)
    if keep > 0:
        keep = keep if peers is None or not at_most else peers.least(keep)
        at = cut_for(keep, asked.layout, asked.mask, call.plan.n, ring.size, at_most=at_most).at
    with torch.autocast(q.device.type, enabled=False), _on(q.device), _in_ring(peers):
        held = lengths[call.rank]
        call.transport.connect("forward")
        q, k, v = (_on_ring(x, call.rows) for x in (q, k, v))
        if kept:
            done = forward_of_front(call, at, kept, q, k, v, sinks, held)
        else:
            done = forward(call, q, k, v, sinks)
        pieces = [] if kept or keep == 0 else behind(call, at, done, held)
    nowhere = q.new_empty(0, dtype=done.ring_lse.dtype)
    lse = nowhere if done.lse is None else done.lse[..., :held].contiguous()
    shared = [done.q, done.k, done.v, done.ring_lse] if call.route.heads > 1 else []
    agreed = torch.tensor([number, at, *lengths], dtype=torch.int64)
    return done.out[:, :held].contiguous(), lse, shared, agreed, pieces


def _of_segments(kept: list[Tensor], at: int, keep: float, at_most: bool) -> Signature:
    """What the ranks must have in common of what they keep, and have kept."""
    return {"keeps": "what fits" if at_most else repr(keep), "recomputes": f"before {at}" if kept else "all"}


@attention_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    kept: list[Tensor],
    at: int,
    keep: float,
    at_most: bool,
    topology: str,
    mask: str,
    config: str,
    *options: Any,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor, list[Tensor]]:
    ring, batch, rows, heads = find(topology), *q.shape[:3]
    out, statistics = q.new_empty((batch, rows, heads, v.shape[-1])), wide(q.dtype)
    lse = q.new_empty((batch, heads, rows), dtype=statistics)
    agreed = torch.empty(2 + ring.size, dtype=torch.int64, device="cpu")
    some = not kept and keep > 0
    if find(config).head_parallel == 1 and not some:
        return out, lse, [], agreed, []
    # Ranks that hold different numbers of tokens pool and keep other numbers of rows than are said here.
    softmax_scale, softcap, return_lse, _ = options
    shape = Shape(*(int(size) for size in (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3])))
    found = ring, find(mask), softmax_scale, softcap, sinks is not None, find(config), return_lse
    with unset_fake_temporarily():  # plans are made of real tensors, and kept
        asked = asked_of(shape, q.dtype, q.device.type, *found)
        call = call_for(asked, [shape.tokens] * ring.size)
        n = call.plan.n
        at = cut_for(keep, asked.layout, asked.mask, n, ring.size, at_most=at_most).at if some else n
    shared, ring_lse = [], lse
    if call.route.heads > 1:
        shapes = [pooled_like(x, call.head_group) for x in (q, k, v)]
        ring_lse = q.new_empty((batch, shapes[0][2], shapes[0][1]), dtype=statistics)
        shared = [*(q.new_empty(shape) for shape in shapes), ring_lse]
    pieces = []
    if some:
        pieces = behind(
            call, at, Attended(out, lse if call.lse_at_home else None, q, k, v, ring_lse), shape.tokens
        )
    if call.route.heads > 1 and not call.lse_at_home:
        lse = q.new_empty(0, dtype=statistics)
    return out, lse, shared, agreed, pieces


@torch.library.custom_op("burst_mcore::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    on_ring: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    agreed: Tensor,
    kv_heads: int,
    topology: str,
    mask: str,
    config: str,
    softmax_scale: float | None,
    softcap: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) of `attention_forward`, its gradients first; dsinks is empty without sinks.

    on_ring: q, k, v and lse as the forward had them on the ring.
    """
    number, _, *lengths = agreed.tolist()
    q, k, v, ring_lse = on_ring
    ring, held = find(topology), out.shape[1]
    peers = agreement(ring)
    shape = Shape(out.shape[0], held, out.shape[2], kv_heads, q.shape[-1], out.shape[-1])
    with _refusing(peers):
        chosen = find(config)
        options = softmax_scale, softcap, sinks is not None, chosen, return_lse
        asked = asked_of(shape, out.dtype, out.device.type, ring, find(mask), *options)
        call = call_for(asked, lengths)
        sign = {**signature(asked, True), **signature_of_call(call), "of call": str(number)}
        if dlse is not None:
            call = replace(call, kernel=taking_delta(chosen.kernel, call.problem))
            sign["kernel used"] = call.kernel.name
    if peers is not None:
        peers.agree({"pass": "backward", "gradient through lse": str(dlse is not None), **sign})
    with torch.autocast(out.device.type, enabled=False), _on(out.device), _in_ring(peers):
        call.transport.connect(call.direction)
        dout = dout.contiguous()
        delta = row_delta(dout, out)
        if dlse is not None:  # d lse / d scores = P, which enters dS as -D does
            delta -= dlse
        dsinks = out.new_empty(0) if sinks is None else _sinks_gradient(sinks, lse, delta)
        if call.route.heads == 1:
            q, k, v, ring_lse = (_on_ring(x, call.rows) for x in on_ring)
        dout, out, delta = (_on_ring(x, call.rows) for x in (dout, out, delta))
        gradients = backward(call, Queries(q, dout, delta, ring_lse), Keys(k, v), out)
    dq, dk, dv = (x[:, :held].contiguous() for x in gradients)
    return dq, dk, dv, dsinks


@attention_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    on_ring: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    agreed: Tensor,
    kv_heads: int,
    *handles: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, _, v, _ = on_ring
    shape, kv = (*out.shape[:2],), kv_heads
    dq = q.new_empty((*shape, out.shape[2], q.shape[-1]))
    dk, dv = q.new_empty((*shape, kv, q.shape[-1])), q.new_empty((*shape, kv, v.shape[-1]))
    return dq, dk, dv, out.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Save what the backward needs; hold what the handles stand for."""
    q, k, v, sinks, kept, _, _, _, *ctx.given, _ = inputs
    out, lse, shared, agreed, _ = output
    ctx.kv_heads, ctx.pieces = k.shape[2], len(kept)
    ctx.kept = [find(handle) for handle in ctx.given[:3]]
    ctx.save_for_backward(*(shared or (q, k, v, lse)), sinks, out, lse, agreed)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    *on_ring, sinks, out, lse, agreed = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = attention_backward(
        dout, dlse, on_ring, sinks, out, lse, agreed, ctx.kv_heads, *ctx.given
    )
    return dq, dk, dv, None if sinks is None else dsinks, [None] * ctx.pieces, *(None for _ in range(10))


def _no_second_derivative(ctx: Any, *gradients: Tensor | None) -> None:
    raise RuntimeError("burst_attention can be differentiated once: its gradients have no derivative")


attention_forward.register_autograd(_gradients, setup_context=_keep)
attention_backward.register_autograd(_no_second_derivative)


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum of P_sink D: a sink is a key whose value is zero, so that its dP is (lse, delta [B, H, S])."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _in_ring(peers: Agreement | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if peers is None else peers.ring()


def _on_ring(x: Tensor, rows: int) -> Tensor:
    """x with so many rows, zeros at its end, which are in no tile; [B, S, H, D] with unit stride along D."""
    if x.dim() == 3:
        return torch.nn.functional.pad(x, (0, rows - x.shape[2])) if x.shape[2] < rows else x
    if x.shape[1] < rows:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[1]))
    return x if x.stride(-1) == 1 else x.contiguous()
