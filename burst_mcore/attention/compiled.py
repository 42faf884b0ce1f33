"""burst_attention as one opaque operator, for torch.compile and dispatch modes (selective checkpointing).

A graph carries the key of a call's options, and a ticket: a small tensor with the record of a forward, whose
storage has the state for backward as an attribute. Detached copies share that, and no host synchronizes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
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
    """Options under a key, which fixes shapes of results: torch's disk cache of graphs sees only the key."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.key = f"{next(_NUMBERS)} of {options.topology.size} ranks, {options.return_max_logit}"
        _BY_KEY[self.key] = self


_NUMBERS = itertools.count()
_BY_KEY: WeakValueDictionary[str, Keyed] = WeakValueDictionary()
_keyed_in_graphs = functools.cache(Keyed)  # for the whole process: no event reports the end of a graph


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def key_in_graph(*options: Any) -> str:
    """Return the key of options while Dynamo traces; its guards hold the objects."""
    return _keyed_in_graphs(Options(*options)).key


def _options(key: str) -> Options:
    if (keyed := _BY_KEY.get(key)) is not None:
        return keyed.options
    raise RuntimeError("a traced call's options are gone: trace by torch.compile, which keeps them")


@torch.library.custom_op("burst_mcore::attention_forward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, up: Tensor | None, key: str, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, the max logits and a ticket; unless requested lse is blank, max logits empty."""
    options, tensors = _options(key), Tensors(q, k, v, sinks, up)
    with agreement_of(options.topology).refusing():
        request = validate(tensors, options)
        compare(CallId(request, entered.layer, options.topology))
    results = run_forward(request, options.topology, tensors, needs_gradient, NOTHING_KEPT)
    lse = results.lse if results.lse.numel() else results.lse.new_empty(q.shape[0], q.shape[2], q.shape[1])
    values = torch.tensor([results.record.number, *results.record.lengths], pin_memory=q.is_cuda)
    ticket = values.to(q.device, non_blocking=True)
    on_ring = () if results.saved.q is q else results.saved[:4]  # under head x ring q, k, v and lse
    ticket.untyped_storage().kept = results.record, on_ring  # type: ignore[attr-defined]
    return results.out, lse, results.max_logit, ticket


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Any, up: Any, key: str, needs_gradient: bool) -> Any:
    options = _options(key)
    out = q.new_empty((*q.shape[:3], Tensors(q, k, v, sinks, up).value_dim))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
    max_logit = lse.new_empty(q.shape[2] if options.return_max_logit else 0)
    return out, lse, max_logit, q.new_empty(1 + options.topology.size, dtype=torch.int64)


@torch.library.custom_op("burst_mcore::attention_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def attention_backward(
    dresults: Sequence[Tensor | None], inputs: Sequence[Tensor | None], results: Sequence[Tensor], key: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs, `Tensors`, empty for a missing one; results: see `_save`."""
    q, k, v, sinks, up = tensors = Tensors._make(inputs)
    out, lse, ticket = results
    options = _options(key)
    with agreement_of(options.topology).refusing():
        request = validate(tensors, options)
        kept = getattr(ticket.untyped_storage(), "kept", None)
        record, on_ring = kept or (Agreed(int(ticket[0]), ticket[1:, None].tolist()), None)
        if kept is None and call_of(request, record.lengths).route.heads > 1:
            raise RuntimeError(
                "a hook has moved the saved tensors of a compiled call: set head_parallel=1 or call eagerly"
            )
    saved = Saved._make((*(on_ring or (q, k, v, lse)), sinks, out, lse, None if up is None else k, up))
    gradients = run_backward(request, options.topology, record, saved, *dresults)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)  # type: ignore[return-value]


@attention_backward.register_fake
def _(dresults: Any, inputs: Any, results: Any, key: str) -> Any:
    return tuple(inputs[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (*tensors, key, _), (*results, max_logit, ticket) = inputs, output
    ctx.keyed = _BY_KEY[key]
    ctx.save_for_backward(*tensors, *results, ticket)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(max_logit, ticket)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    *inputs, out, lse, ticket = ctx.saved_tensors
    gradients = attention_backward((dout, dlse), inputs, (out, lse, ticket), ctx.keyed.key)
    return *(None if x is None else dx for x, dx in zip(inputs, gradients, strict=True)), None, None


attention_forward.register_autograd(_gradients, setup_context=_save)
