"""burst_attention as one opaque operator, for torch.compile and dispatch modes (selective checkpointing).

An operator's schema allows only tensors, numbers and strings. So a graph carries the key of a call's options,
and a ticket: a small tensor with the record of a forward. An attribute of its storage, which detached copies
share, has the record, too, and the other state for backward: the host would synchronize to read the values.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from burst_mcore.agreement.agreement import Agreed
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.function import Saved, run_backward, run_forward
from burst_mcore.attention.replay import NOTHING_KEPT, CallId, compare, entered
from burst_mcore.attention.request import Options, Tensors, validate
from burst_mcore.attention.resolve import call_of
from burst_mcore.dtypes import wide


class Keyed:
    """Options under a string key, for an operator's schema."""

    def __init__(self, options: Options) -> None:
        # The key fixes the shapes of results: torch's disk cache of graphs sees only the key.
        self.options, self.key = options, f"{next(_NUMBERS)} of {options.topology.size}"
        _BY_KEY[self.key] = self


_NUMBERS = itertools.count()
_BY_KEY: WeakValueDictionary[str, Keyed] = WeakValueDictionary()
_OF_GRAPHS: dict[Options, Keyed] = {}
"""The options in graphs, kept for the whole process: no event reports the end of a graph."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def key_in_graph(*options: Any) -> str:
    """Return the key of options while Dynamo traces; its guards hold the objects."""
    for each in [x for x in _OF_GRAPHS if (ring := x.topology.communicators) and ring.destroyed]:
        del _OF_GRAPHS[each]
    key_options = Options(*options)
    return _OF_GRAPHS.setdefault(key_options, Keyed(key_options)).key


def _options(key: str) -> Options:
    keyed = _BY_KEY.get(key)
    if keyed is None:
        raise RuntimeError("a traced call's options are gone: trace by torch.compile, which keeps them")
    return keyed.options


@torch.library.custom_op("burst_mcore::attention_forward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, up: Tensor | None, key: str, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, the max logits and a ticket; lse and max logits are uninitialised unless requested."""
    options, tensors = _options(key), Tensors(q, k, v, sinks, up)
    with agreement_of(options.topology).refusing():
        request = validate(tensors, options)
        compare(CallId(request, entered.layer, options.topology))
    results = run_forward(request, options.topology, tensors, needs_gradient, NOTHING_KEPT)
    pairs = zip((results.lse, results.max_logit), _statistics(q), strict=True)
    lse, max_logit = (result if result.numel() else blank for result, blank in pairs)
    values = torch.tensor([results.record.number, *results.record.lengths], pin_memory=q.is_cuda)
    ticket = values.to(q.device, non_blocking=True)
    on_ring = () if results.saved.q is q else results.saved[:4]  # under head x ring q, k, v and lse
    ticket.untyped_storage().kept = results.record, on_ring  # type: ignore[attr-defined]
    return results.out, lse, max_logit, ticket


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Any, up: Any, key: str, needs_gradient: bool) -> Any:
    out = q.new_empty((*q.shape[:3], Tensors(q, k, v, sinks, up).value_dim))
    ticket = q.new_empty(1 + _options(key).topology.size, dtype=torch.int64)
    return out, *_statistics(q), ticket


def _statistics(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for lse [B, H, S] and the max logits [H]."""
    (batch, tokens, heads, _), dtype = q.shape, wide(q.dtype)
    return q.new_empty((batch, heads, tokens), dtype=dtype), q.new_empty(heads, dtype=dtype)


@torch.library.custom_op("burst_mcore::attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def attention_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    up: Tensor | None, out: Tensor, lse: Tensor, ticket: Tensor, key: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, sinks and up; empty for a missing input."""
    options = _options(key)
    with agreement_of(options.topology).refusing():
        request = validate(Tensors(q, k, v, sinks, up), options)
        kept = getattr(ticket.untyped_storage(), "kept", None)
        record, on_ring = kept or (Agreed(int(ticket[0]), tuple(ticket[1:].tolist())), ())
        if kept is None and call_of(request, record.lengths).route.heads > 1:
            raise RuntimeError(
                "a hook has moved the saved tensors of a compiled call whose ranks share heads: set "
                "head_parallel=1, or leave the call out of the graph (torch.compiler.disable)"
            )
    latent = k if up is not None else None
    q, k, v, ring_lse = on_ring or (q, k, v, lse)
    saved = Saved(q, k, v, ring_lse, sinks, out, lse, latent, up)
    gradients = run_backward(request, options.topology, record, saved, dout, dlse)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)  # type: ignore[return-value]


@attention_backward.register_fake
def _(dout: Any, dlse: Any, *others: Any) -> Any:
    return tuple(others[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in others[:5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (*tensors, key, _), (*results, max_logit, ticket) = inputs, output
    ctx.keyed = _BY_KEY[key]
    ctx.save_for_backward(*tensors, *results, ticket)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit, ticket)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = attention_backward(dout, dlse, *saved, ctx.keyed.key)
    return *(None if x is None else dx for x, dx in zip(saved[:5], gradients, strict=True)), None, None


attention_forward.register_autograd(_gradients, setup_context=_save)
