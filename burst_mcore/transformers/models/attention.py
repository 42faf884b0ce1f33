"""Attention and masks of Hugging Face transformers, by BurstAttention: attn_implementation="burst".

transformers describes a layer's mask to `mask_of` as a function of indices; what comes back, a `LayerMask`,
travels through the model as its attention_mask (and through whatever checkpoints its layers) to `attend`. A
mask of any other kind is refused: nothing is attended to by a mask that was not understood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.cached import attend_to_cache
from burst_mcore.attention.kernels.kernel import Scores
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import positions
from burst_mcore.mask import Mask
from burst_mcore.recurrent.bound import Mixing
from burst_mcore.rollouts.columns import Columns
from burst_mcore.rollouts.trees import tree_mask
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.llama4 import tempered

NAME = "burst"
"""The attn_implementation."""
UNDERSTOOD = ("position_ids", "cache_position", "num_items_in_batch", "shift_labels", "labels", "s_aux")
"""Tensors that models pass to attention beside q, k and v, and that do not change the mask."""


@dataclass(frozen=True)
class Sequence:
    """The sequences of one forward, of which this rank has a shard."""

    topology: Topology
    config: BurstConfig
    tokens: int
    """Of the whole sequence."""
    ends: tuple[tuple[int, ...], ...] = ()
    """cu_seqlens of each row; () where no row has more than one document."""
    last: int | None = None
    """The highest position of the whole sequence, if this rank has a shard of it."""
    columns: Columns = field(default=Columns(), compare=False)
    """The tree of the row's shared prefixes, and weights of labels."""
    reached: set[nn.Module] = field(default_factory=set, compare=False, repr=False)
    """The attention modules that attended here in this forward."""

    @cached_property
    def mixing(self) -> Mixing | None:
        """What stands for the mask of recurrences and convolutions; None for a whole document a row."""
        if self.topology.size == 1 and not self.ends:
            return None
        return Mixing.of(self.topology, self.config, self.tokens, self.ends)

    def masks(self, window: int | None, chunk: int | None = None) -> tuple[Mask, ...]:
        """By row, or one for all rows: causal, in documents, window and chunks.

        Args:
            window: tokens, the query's own included.
            chunk: tokens of a chunk; each document begins with one.
        """
        seen, every = Mask.causal(), self.ends
        if window is not None and window < self.tokens:
            seen = Mask.window(window - 1, 0)
        if self.columns.tree is not None:
            return (tree_mask(self.columns.tree, seen),)
        if chunk is not None and chunk < self.tokens:
            seen = seen if every else seen & Mask.chunked(chunk)
            every = tuple(_in_chunks(ends, chunk) for ends in every)
        if len(set(every)) > 1:
            return tuple(seen & Mask.documents(ends) if len(ends) > 2 else seen for ends in every)
        return (seen & Mask.documents(every[0]),) if every else (seen,)

    def places(self) -> Tensor:
        """Return the place of each token of this rank in its document, [rows or 1, tokens]."""
        own = {"rank": self.topology.rank, "size": self.topology.size, "layout": self.config.layout}
        at = positions(self.tokens, **own)  # type: ignore[arg-type]
        rows = [torch.tensor(ends) for ends in self.ends or ((0, self.tokens),)]
        return torch.stack([at - ends[torch.searchsorted(ends, at, right=True) - 1] for ends in rows])


def _in_chunks(ends: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (*chain.from_iterable(range(a, b, size) for a, b in pairwise(ends)), ends[-1])


@dataclass(frozen=True)
class LayerMask:
    """The keys that the queries of a layer see; stands for its attention_mask."""

    sequence: Sequence
    masks: tuple[Mask, ...]
    window: int | None
    offset: int = 0
    """Tokens in the cache before the first query."""

    @property
    def mixing(self) -> Mixing | None:
        """What stands for the mask of a recurrence that gets this one."""
        return self.sequence.mixing

    def __getitem__(self, key: Any) -> LayerMask:
        """Itself, where all of it is asked for: some models slice their masks by what keeps everything."""
        keys = key if isinstance(key, tuple) else (key,)
        whole = (slice(None), slice(0, None))
        if not all(k is Ellipsis or (isinstance(k, slice) and k in whole) for k in keys):
            raise RefusedError("mask", f"the model takes a part of a layer's mask, [{key}]: not served")
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # as Python asks for them, to see whether they are there
        raise _NoTensorError(
            "mask", f"the model works on a layer's mask as on a tensor ('{name}'), which burst never makes"
        )


class _NoTensorError(RefusedError, AttributeError):  # type: ignore[misc]  # both have a `name`
    """Of a mask that is asked for what a tensor has: `hasattr` says no."""


_current: list[Sequence] = []
"""The sequence whose forward runs. `SequenceParallel` sets it around the model's own forward."""


class running:  # noqa: N801  # a context manager, used like a function
    """Make `sequence` the current one: within, masks are those of this sequence."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        _current.append(self._sequence)

    def __exit__(self, *_: object) -> None:
        _current.pop()


def current() -> Sequence | None:
    """Return the sequence of the forward that runs, or None."""
    return _current[-1] if _current else None


def register() -> None:
    """Make attn_implementation="burst" known to transformers. Further calls change nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of)


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> LayerMask:
    """transformers' mask interface: the mask of a kind of layers, from the function that describes it.

    Raises:
        RefusedError: it is not causal, a causal window, causal chunks, or packed documents of these.
    """
    sequence = current()
    if sequence is None:
        raise RefusedError(
            "attention outside of an engine",
            'attn_implementation="burst" works in models that burst_mcore.deepspeed.initialize or '
            "burst_mcore.torch.parallelize has prepared",
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise RefusedError(
            "attention_mask", "padding must be taken out by the loader (burst.shard_loader, cp.loader)"
        )
    kinds = set(_terms(mask_function))
    window, chunk = (min((size for kind, size in kinds if kind == x), default=None) for x in _SIZED)
    if ("causal", 0) not in kinds:
        raise RefusedError("mask", "the model asks for attention that is not causal")
    return LayerMask(sequence, sequence.masks(window, chunk), window, int(q_offset))


_SIZED = ("window", "chunk")


def _terms(function: Any) -> Iterator[tuple[str, int]]:
    """Yield the terms of a mask function of transformers, by the names of its parts."""
    name = getattr(function, "__qualname__", repr(function))
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    variables = (
        dict(zip(code.co_freevars, (cell.cell_contents for cell in closure), strict=True)) if code else {}
    )
    match name.split(".<locals>")[0]:
        case "causal_mask_function":
            yield "causal", 0
        case "sliding_window_overlay":
            yield "window", int(variables["sliding_window"])
        case "chunked_overlay":
            yield "chunk", int(variables["chunk_size"])
        case "and_masks":
            for part in variables["mask_functions"]:
                yield from _terms(part)
        case "packed_sequence_mask_function":
            return  # found in this rank's shard alone; `Sequence` has the documents of the whole
        case "remap_positions_for_packed_sequence" | "add_offsets_to_mask_function":
            yield from _terms(variables["mask_function"])
        case "padding_mask_function":
            return  # checked to hide nothing
        case _:
            raise RefusedError("mask", f"the model asks for a mask that is not served: {name}")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [batch, heads, local sequence, head_dim], after rotary embedding. key, value: of the K/V heads.
        attention_mask: what `mask_of` made.

    Returns:
        [batch, local sequence, heads, value_dim], and None.

    Raises:
        RefusedError: the model asks for what this attention does not do; it is named.
    """
    name = type(module).__name__
    if not isinstance(attention_mask, LayerMask):
        mask = "no mask" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise RefusedError(
            "model",
            f"{name} got {mask} that does not come from transformers' mask interface: what it may see is "
            f"unknown",
        )
    if dropout:
        raise RefusedError(
            "dropout", f"{name} asks for attention dropout {dropout}: set attention_dropout to 0"
        )
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise RefusedError("mask", f"{name} asks for attention that is not causal")
    if others.get("output_attentions"):
        raise RefusedError("output_attentions", "attention weights are never made")
    if sliding_window is not None and sliding_window != attention_mask.window:
        raise RefusedError(
            "mask",
            f"{name} has a sliding_window of {sliding_window}, its mask one of {attention_mask.window}",
        )
    odd = [k for k, x in others.items() if isinstance(x, Tensor) and k not in UNDERSTOOD]
    if odd:
        raise RefusedError(
            "model",
            f"{name} hands {', '.join(odd)} to its attention, which is not served. What the model need not "
            f"have, leave out of the batch",
        )
    _arrived(attention_mask.sequence, module)
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding leaves q and k in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    sinks = others.get("s_aux")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    asked: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "sinks": sinks}
    if attention_mask.offset or q.shape[1] != k.shape[1]:
        return _from_cache(q, k, v, attention_mask, **asked), None
    sequence, masks = attention_mask.sequence, attention_mask.masks
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        q = tempered(module, q, sequence.places())
    rows = [slice(None)] if len(masks) == 1 else [slice(row, row + 1) for row in range(len(q))]
    outs = [
        burst_attention(
            q[at], k[at], v[at], topology=sequence.topology, mask=mask, config=sequence.config, **asked
        )
        for at, mask in zip(rows, masks, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs), None  # type: ignore[arg-type, return-value]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _arrived(sequence: Sequence, module: nn.Module) -> None:
    """Note that a module attended here; a compiled frame, which serves many layers, would note the first."""
    sequence.reached.add(module)


def _from_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: LayerMask,
    *,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from a few new tokens to all keys of a cache, which every rank has, in plain torch.

    Raises:
        RefusedError: each rank has a shard of the new tokens: a wrapper handed the cache to the model inside.
    """
    if seen.sequence.last is not None:
        before = k.shape[1] - q.shape[1]
        raise RefusedError(
            "cache",
            f"a forward over shards attends to {before} tokens of a cache that was handed to the model "
            "inside (prefix tuning?): each rank would see them and its shard alone",
        )
    last = seen.offset + q.shape[1]
    queries = torch.arange(seen.offset, last, device=q.device)
    keys = torch.arange(last - k.shape[1], last, device=q.device)  # a cache of a window forgets the first
    ahead = keys[None, :] - queries[:, None]
    allowed = (ahead <= 0) if seen.window is None else (ahead <= 0) & (ahead > -seen.window)
    scores = Scores(1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale, softcap)
    return attend_to_cache(q, k, v, allowed, scores, sinks)
