"""burst_attention, the public function; in checkpointed layers its calls save a tail of their results."""

from __future__ import annotations

import math
from itertools import product
from typing import Never

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from burst_mcore.attention.autotune.ways import (
    Ranks,
    check_mesh,
    placements,
    route_for,
    searched_rings,
    why_not_placed,
)
from burst_mcore.attention.checks import check_dense
from burst_mcore.attention.numerics.latent import Latent
from burst_mcore.attention.operator.agree import agreement_of, refusing
from burst_mcore.attention.operator.ops import attend, attention_forward
from burst_mcore.attention.operator.schema import ForwardArgs, ForwardResults
from burst_mcore.attention.recompute.replay import CallId, SavedTail, entered, in_checkpoint
from burst_mcore.attention.request import Options, Request, handle_of, options_of, topology_of, validate
from burst_mcore.attention.runtime.executor import ProcessGroups
from burst_mcore.attention.runtime.record import unpack
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.config import SETTINGS, BurstConfig, sides_of
from burst_mcore.dtypes import autocast
from burst_mcore.mask import Mask
from burst_mcore.words import brief, no_argument

_CONFIG = BurstConfig()
"""The config of calls without one: made once, since a compiled graph cannot make it."""


def burst_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    topology: Topology,
    mask: Mask,
    latent: Latent | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    config: BurstConfig | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
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
        latent: instead of k and v, what they are made of in multi-latent attention: a latent [batch, local
            sequence, R], a rope key [batch, local sequence, 1, Dr] and weights [heads, R, Dk + Dv], with
            Dk = head_dim - Dr. The latent travels, by its field `travels`; K and V are not saved for
            backward, but made again, except where they travel and heads are shared. The gradient of the
            weights is this rank's share, as that of sinks.
        softmax_scale: default 1 / sqrt(head_dim).
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [heads], floating point: a logit of each head that takes part in the softmax of every query and
            brings no value. Its gradient is that of this rank's queries: sum it over the ranks, as gradients
            of weights are. Every rank gives the same.
        config: default `BurstConfig()`.
        return_lse: also return the log-sum-exp of the scaled scores.
        return_max_logit: also return, last, the largest scores, for qk-clip. Kernels "te" (2.9 and later, in
            tiles without documents) and "reference" form them in passing; after others, each tile is attended
            once more, and nothing is sent twice.
        unknown: none is legal; a name that another package has is answered with what to write here.

    Under torch.autocast q, k, v and a latent are cast, as those of scaled_dot_product_attention.

    Returns:
        out [batch, local sequence, heads, value_dim] in the dtype of q, and with `return_lse` also lse
        [batch, local sequence, heads] in float32 (float64 for float64 inputs), -inf where a query sees no
        key, nor has a sink. It is differentiable, on all ranks or none: kernels that do not take D itself
        then work on 8 more head columns in backward. With `return_max_logit` also [heads] in the dtype of
        lse, without a gradient: the largest score of each head that this rank formed, softmax_scale q k^T
        where a query sees a key, before a softcap and without sinks; -inf if none. That of the whole
        sequence is the maximum over the ranks, which is the caller's to take.

    Raises:
        ValueError: before any communication, this rank's arguments are not legal. After an exchange of a few
            bytes, another rank's are not, or differ from this rank's. The layout or the mask do not fit the
            length of the global sequence, which is known only then.
        RuntimeError: a rank of the ring has gone; the message names the step and hop. After any error in
            mid-ring later calls on the same process group are refused, on all ranks.
    """
    config = _CONFIG if config is None else config
    request = None
    if torch.compiler.is_compiling():  # a compiled call is checked when it runs
        k, v, up, travels = _keys(k, v, latent, unknown)
        q, k, v, up = autocast(q, k, v, up)
        handles = topology.handle, mask.handle, config.handle
        scale, softcap = (None if x is None else guard_scalar(x) for x in (softmax_scale, softcap))
        handle = handle_of(handles, scale, softcap, bool(return_lse), bool(return_max_logit), travels)
    else:
        if not isinstance(topology, Topology):
            raise ValueError(
                f"topology must be a Topology, got {brief(topology)}: Topology.from_group(group), of a "
                f"DeviceMesh mesh.get_group(), or Topology.single()"
            )
        with refusing(agreement_of(topology)):
            k, v, up, travels = _keys(k, v, latent, unknown)
            if torch._C._is_any_autocast_enabled():  # of any device
                q, k, v, up = autocast(q, k, v, up)
            numbers = softmax_scale, softcap, bool(return_lse), bool(return_max_logit), travels
            options = Options.of(topology, mask, config, *numbers)
            request, handle = validate(q, k, v, options, sinks=sinks, up=up), options.handle
    tensors = [x for x in (q, k, v, sinks, up) if x is not None]
    needs_gradient = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])
    args = ForwardArgs(q, k, v, sinks, handle, needs_gradient, up=up)
    if in_checkpoint():
        results: ForwardResults = _checkpointed(args, request)
    else:
        results = ForwardResults(*attention_forward(*args)) if request is None else attend(args, request)
    if not return_lse and not return_max_logit:
        return results.out
    lse = [results.lse.transpose(1, 2)] if return_lse else []
    max_logit = [results.max_logit.detach()] if return_max_logit else []
    return results.out, *lse, *max_logit


_ARGUMENTS = [*burst_attention.__annotations__][:-2]
"""The names of the arguments: not of what is unknown, nor of the result."""


def _keys(
    k: Tensor | None, v: Tensor | None, latent: Latent | None, unknown: dict[str, Never]
) -> tuple[Tensor, Tensor, Tensor | None, str]:
    """Return k, v, no weights, "off"; or the latent and the rope key as [B, S, 1, .], and their weights."""
    if unknown:
        ours = {name: f"config=BurstConfig({name}=...)" for name in SETTINGS}
        raise no_argument("burst_attention", unknown, _ARGUMENTS, ours)
    if latent is None:
        if k is None or v is None:
            missing = " and ".join(name for name, tensor in (("k", k), ("v", v)) if tensor is None)
            raise ValueError(f"burst_attention needs k and v, or latent=Latent(...), got no {missing}")
        return k, v, None, "off"
    if k is not None or v is not None:
        raise ValueError("burst_attention takes k and v, or latent, not both")
    if not isinstance(latent, Latent) or not all(isinstance(x, Tensor) for x in latent[:3]):
        parts = latent[:3] if isinstance(latent, Latent) else (latent,)
        got = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"latent must be a Latent(compressed, rope_key, weight) of tensors, got {got}")
    check_dense("latent.compressed", latent.compressed)
    if latent.compressed.dim() != 3:
        raise ValueError(
            f"latent.compressed must be [batch, local sequence, R], got {tuple(latent.compressed.shape)}"
        )
    return latent.compressed.unsqueeze(2), latent.rope_key, latent.weight, latent.travels


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _checkpointed(args: ForwardArgs, request: Request | None) -> ForwardResults:
    """Return the results of a call that is made in a checkpointed function.

    Not compiled: a forward that saves a tail and its recomputation would be two graphs, and torch matches
    their saved tensors by place.
    """
    agreement = agreement_of(topology_of(args.options))
    with refusing(agreement):
        options = options_of(args.options)
        request = request or validate(*args[:3], options, sinks=args.sinks, up=args.up)
        own_id = CallId(request.shard, entered.layer, options.told, request.sinks)
        tails = [replay.replay(own_id) for replay in entered.replays]
        tail = next((tail for tail in tails if tail is not None), None)
        keep, at_most = max([(0.0, False), *(recording.share(own_id) for recording in entered.recordings)])
    if tail is not None:
        results = attend(args._replace(tail=tail.tensors, cut=tail.cut), request)
    else:
        args = args._replace(keep=keep, at_most=at_most)
        results = attend(args, request)
        lse_at_home = request.return_lse or request.sinks
        tensors = results.whole(lse_at_home=lse_at_home) if args.whole else results.tail
        cut = unpack(results.record).cut
        tail = SavedTail(cut, [x.detach() for x in tensors], copied=not args.whole)
    with refusing(agreement):
        for recording in entered.recordings:
            recording.record(own_id, tail)
    return results


def connect(topology: Topology, config: BurstConfig) -> None:
    """Make the communicators that calls with `config` will use, now instead of in the first call.

    Collective over the ring; on gloo there is nothing to make. Settings of "auto" are decided only in a call.

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
    sides = sides_of(config.mesh)
    if sides:
        check_mesh(config, sides, ranks)
        degree = ranks.size // math.prod(sides)
    rings = sides[0] if sides else 1
    words = [word for word in searched_rings(config.ring, ranks) if word != "direct" or rings == 1]
    for ring, outer in product(words, placements(config.head_placement, degree, ranks)):
        route = route_for(degree, ranks, ring=ring, overlap=config.overlap, outer=outer, rings=rings)
        transport = ProcessGroups(topology, route, config.max_ctas)
        for pass_ in Pass:
            transport.connect(pass_)
