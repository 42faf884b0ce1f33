"""burst_attention, the public function; in checkpointed layers its calls save a suffix of their results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Never

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.checks import check_parts, no_topology
from burst_mcore.attention.compiled import Keyed, attention_forward, key_in_graph
from burst_mcore.attention.function import attend, gradient_wanted
from burst_mcore.attention.numerics.latent import Latent
from burst_mcore.attention.replay import entered, keeps_results
from burst_mcore.attention.request import Options, Tensors, validate
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import SETTINGS, BurstConfig
from burst_mcore.dtypes import autocast
from burst_mcore.mask import Mask
from burst_mcore.words import no_argument

_PLAIN = (Tensor, torch.nn.Parameter, type(None))
_CONFIG = BurstConfig()
"""The default config, built at import, since a compiled graph cannot build it."""


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
            holds its shard: fewer tokens than others, or none, where the length does not divide.
        k: [batch, local sequence, kv_heads, head_dim]; kv_heads divides heads and is never repeated on the
            ring. Same dtype and device as q.
        v: [batch, local sequence, kv_heads, value_dim].
        topology: the ring. It has no default: attention over one rank is `Topology.single()`.
        mask: over global positions; `config.layout` says which positions a rank holds. A query that may
            attend to no key gets zeros.
        latent: the inputs of multi-latent attention (MLA), instead of k and v: a latent [batch, local
            sequence, R], a rope key [batch, local sequence, 1, Dr] and weights [heads, R, Dk + Dv], with
            Dk = head_dim - Dr. The latent rotates, by its field `rotates`; K and V are not saved for
            backward, but recomputed, except where they rotate and heads are sharded. Weight gradients are
            per-rank partial sums, like those of sinks.
        softmax_scale: default 1 / sqrt(head_dim).
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [heads], floating point: a logit of each head that takes part in the softmax of every query and
            has a value of zero; the same on every rank. Its gradient is a partial sum over this rank's
            queries: all-reduce it, like gradients of weights.
        config: default `BurstConfig()`.
        return_lse: also return the log-sum-exp of the scaled scores.
        return_max_logit: also return, last, the max logits, for qk-clip. Kernels compute each tile's scores
            once more, without more communication.
        unknown: rejected; the error names our argument for an alias of another package.

    Under torch.autocast q, k, v and a latent are cast, like inputs of scaled_dot_product_attention.

    Returns:
        out [batch, local sequence, heads, value_dim] in the dtype of q, and with `return_lse` also lse
        [batch, local sequence, heads] in float32 (float64 for float64 inputs), -inf where a query sees no
        key, nor has a sink. lse is differentiable, on all ranks or none: backward of kernels that compute D
        from O then has 8 more head columns. With `return_max_logit` also [heads] in the dtype of
        lse, without a gradient: this rank's max logit of each head, the maximum of softmax_scale q k^T
        where a query sees a key, before a softcap and without sinks; -inf if none. The caller takes the
        maximum over the ranks.

    Raises:
        ValueError: before any communication, this rank's arguments are not legal. After an exchange of a few
            bytes, another rank's arguments are not, or differ from this rank's; or the layout or the mask do
            not fit the length of the global sequence, which is known only then.
        RuntimeError: a rank of the ring has gone; the message names the step and the message. After any error
            in mid-ring, later calls on the same process group raise at once, on all ranks.
    """
    config = _CONFIG if config is None else config
    softcap = None if softcap == 0 else softcap  # 0: none, as flash-attn has it
    extra_results = bool(return_lse), bool(return_max_logit)
    if torch.compiler.is_compiling():  # the call is checked when the graph runs
        softmax_scale, softcap = (None if x is None else guard_scalar(x) for x in (softmax_scale, softcap))
        telling: AbstractContextManager[None] = nullcontext()
    else:
        if not isinstance(topology, Topology):
            raise no_topology(topology)
        telling = agreement_of(topology).refusing()
    with telling:
        tensors, rotates = tensors_of(q, k, v, latent, sinks, unknown)
    options = Options(topology, mask, config, softmax_scale, softcap, *extra_results, rotates)
    out, lse, max_logit = _attended(tensors, options)
    results = [out]
    if return_lse:
        results.append(lse.transpose(1, 2))
    if return_max_logit:
        results.append(max_logit)
    return out if len(results) == 1 else tuple(results)


def _attended(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and the max logits, by the autograd function, or in a graph by the custom operator."""
    if torch.compiler.is_compiling():
        if keeps_results():  # torch matches saved tensors of a forward and its recomputation by their order
            out, lse, max_logit = _untraced(tensors, options)
            return out, lse, max_logit
        key = key_in_graph(*options)
    else:
        with agreement_of(options.topology).refusing():
            request = validate(tensors, options)
        plain = all([type(x) in _PLAIN for x in tensors])  # a subclass is unwrapped by the dispatcher
        if entered.in_checkpoint or (plain and not is_in_torch_dispatch_mode()):
            return attend(tensors, request, options.topology)
        keyed = Keyed(options)  # alive until the operator is done
        key = keyed.key
    out, lse, max_logit, _ = attention_forward(*tensors, key, gradient_wanted(tensors))
    return out, lse, max_logit


_untraced = torch.compiler.disable(_attended)

_ARGUMENTS = [*burst_attention.__annotations__][:-2]
"""The names of the legal arguments: without `unknown` and the result."""


def tensors_of(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    latent: Latent | None,
    sinks: Tensor | None,
    unknown: dict[str, Never],
) -> tuple[Tensors, str]:
    """Return the tensors of a call, cast as under autocast, and `Latent.rotates`."""
    if unknown:
        ours = {name: f"config=BurstConfig({name}=...)" for name in SETTINGS}
        raise no_argument("burst_attention", unknown, _ARGUMENTS, ours)
    if latent is None:
        if k is None or v is None:
            names = " and ".join(name for name, tensor in (("k", k), ("v", v)) if tensor is None)
            raise ValueError(f"burst_attention needs k and v, or latent=Latent(...), got no {names}")
        up, rotates = None, "off"
    else:
        if k is not None or v is not None:
            raise ValueError("burst_attention takes k and v, or latent, not both")
        check_parts(latent)
        k, v, up, rotates = latent.compressed.unsqueeze(2), latent.rope_key, latent.weight, latent.rotates
    q, k, v, up = autocast(q, k, v, up)
    return Tensors(q, k, v, sinks, up), rotates
