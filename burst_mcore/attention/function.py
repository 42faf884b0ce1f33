"""burst_attention: the public function, and the autograd node around the two passes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_mcore.attention.agreement import Agreement, Signature, agreement
from burst_mcore.attention.arguments import Asked, call_for, checked, signature, signature_of_call
from burst_mcore.attention.choice import Ranks, route_for, why_not_placed
from burst_mcore.attention.passes import Call, Keys, Queries, backward, forward, row_delta
from burst_mcore.attention.ring import ProcessGroups
from burst_mcore.attention.schedule import PASSES
from burst_mcore.attention.topology import Topology
from burst_mcore.config import BurstConfig
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
        key. It is differentiable, on all ranks or none: kernels that do not take D itself then work on 8
        more head columns in backward.

    Raises:
        ValueError: before any communication if this rank's arguments are not legal; after an exchange of a
            few bytes if another rank's are not, or differ from this rank's, or if the layout or the mask do
            not go with the length of the global sequence, which is known only then.
        RuntimeError: a rank of the ring has gone; says at which step and hop. After any error in mid-ring
            later calls on the same process group are refused, on all ranks.
    """
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology must be a Topology, got {topology!r}: Topology.from_group(group) or Topology.single()"
        )
    peers = agreement(topology)
    config = BurstConfig() if config is None else config
    try:
        asked = checked(q, k, v, topology, mask, softmax_scale, softcap, sinks, config, return_lse)
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        sign = signature(asked, wanted)
    except Exception as error:
        if peers is not None:
            peers.refuse(error)
        raise
    call, sign = _agreed(asked, peers, sign)
    held = q.shape[1]
    inputs = (_rows_dense(_padded(x, call.rows - held)) for x in (q, k, v))
    out, lse = _BurstAttention.apply(call, peers, sign, sinks, *inputs)  # type: ignore[no-untyped-call]
    out = out if held == call.rows else out[:, :held]
    return (out, lse.transpose(1, 2)[:, :held]) if return_lse else out


def _agreed(asked: Asked, peers: Agreement | None, sign: Signature) -> tuple[Call, Signature]:
    """The call that all ranks make, and what its backward will be known by."""
    rows, size = asked.shard.tokens, asked.topology.size
    if peers is None:
        return call_for(asked, [rows] * size), sign
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
        except ValueError:  # on all ranks alike: nobody waits
            raise
        except Exception as error:
            peers.refuse(error)
            raise
        peers.agree({"pass": "forward, lengths known", **sign, **details})
    elif problem is not None:
        raise problem
    assert call is not None
    return call, {**sign, **details, "of call": str(number)}


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


class _BurstAttention(torch.autograd.Function):
    """Saves q, k, v and lse as they are on the ring, and out; one params object crosses."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        peers: Agreement | None,
        signature: Signature,
        sinks: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(q.device.type, enabled=False), _in_ring(peers):
            call.transport.connect("forward")
            done = forward(call, q, k, v, sinks)
        ctx.call, ctx.peers, ctx.signature = call, peers, signature
        of_sinks = (None, None) if sinks is None else (sinks, done.lse)
        ctx.save_for_backward(done.q, done.k, done.v, done.out, done.ring_lse, *of_sinks)
        ctx.set_materialize_grads(False)
        return done.out, done.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        q, k, v, out, lse, sinks, lse_at_home = ctx.saved_tensors
        if dlse is not None:
            try:
                call = call.with_delta_given()
            except ValueError as error:
                if ctx.peers is not None:
                    ctx.peers.refuse(error)
                raise
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        if ctx.peers is not None:
            through_lse = str(dlse is not None)
            ctx.peers.agree({"pass": "backward", "gradient through lse": through_lse, **ctx.signature})
        with torch.autocast(q.device.type, enabled=False), _in_ring(ctx.peers):
            call.transport.connect(call.direction)
            delta = row_delta(dout, out)
            if dlse is not None:  # d lse / d scores = P, which enters dS as -D does
                delta -= dlse
            dq, dk, dv = backward(call, Queries(q, dout, delta, lse), Keys(k, v), out)
            dsinks = None if sinks is None else _sinks_gradient(sinks, lse_at_home, delta)
        return None, None, None, dsinks, dq, dk, dv


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum of P_sink D: a sink is a key whose value is zero, so that its dP is (lse, delta [B, H, S])."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _in_ring(peers: Agreement | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if peers is None else peers.ring()


def _padded(x: Tensor, rows: int) -> Tensor:
    """x with so many rows of zeros at its end; they are in no tile."""
    return x if rows == 0 else torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows))


def _rows_dense(x: Tensor) -> Tensor:
    """x with unit stride along head_dim, as kernels need; any other strides are fine."""
    return x if x.stride(-1) == 1 else x.contiguous()
