"""Attention and masks of Hugging Face transformers, by BurstAttention: attn_implementation="burst".

transformers describes a layer's mask to `mask_of` as a function of indices; what comes back, a `LayerMask`,
rotates through the model as its attention_mask (and through whatever checkpoints its layers) to `attend`. A
mask of any other kind is refused: nothing is attended to by a mask that was not understood.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from itertools import accumulate, chain, pairwise, product
from operator import and_, or_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.kernels.kernel import Scores
from burst_mcore.attention.kernels.reference import attend_to_cache
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.mask import Mask
from burst_mcore.mask.mask import Union
from burst_mcore.mask.terms import Ranges, Window
from burst_mcore.recurrent.bound import Mixing
from burst_mcore.rollouts.columns import Columns
from burst_mcore.rollouts.trees import tree_mask
from burst_mcore.transformers.errors import UnsupportedError

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
    positions: Tensor | None = field(default=None, compare=False, repr=False)
    """Positions of this rank's tokens [rows, tokens], if it has a shard."""
    entering: Tensor | None = field(default=None, compare=False, repr=False)
    """Positions of all tokens [rows, tokens], where they are whole until they enter the text tower."""
    reached: set[nn.Module] = field(default_factory=set, compare=False, repr=False)
    """The attention modules that attended here in this forward."""

    @cached_property
    def mixing(self) -> Mixing | None:
        """What stands for the mask of recurrences and convolutions; None for a whole document a row."""
        if self.topology.size == 1 and not self.ends:
            return None
        return Mixing.of(self.topology, self.config, self.tokens, self.ends)

    def masks(self, function: Any, rows: int) -> tuple[Mask, ...]:
        """By row, or one for all rows: what a mask function of transformers allows, in documents."""
        masks = [
            _read(function, row, ends) & (Mask.documents(ends) if len(ends) > 2 else Mask.full())
            for row, ends in enumerate(self.ends or ((0, self.tokens),) * rows)
        ]
        return tuple(masks if len(set(masks)) > 1 else masks[:1])


@dataclass(frozen=True)
class LayerMask:
    """The keys that the queries of a layer see; stands for its attention_mask."""

    sequence: Sequence
    masks: tuple[Mask, ...]
    window: int | None
    offset: int = 0
    """Tokens in the cache before the first query."""
    ndim, shape = 4, (0, 0, 0, 0)  # so that a text model hands on the mask that the model around it made

    @property
    def mixing(self) -> Mixing | None:
        """What stands for the mask of a recurrence that gets this one."""
        return self.sequence.mixing

    def __getitem__(self, key: Any) -> LayerMask:
        """Itself, where all of it is asked for: some models slice their masks by what keeps everything."""
        keys = key if isinstance(key, tuple) else (key,)
        everything = (slice(None), slice(0, None))
        if not all(k is Ellipsis or (isinstance(k, slice) and k in everything) for k in keys):
            raise UnsupportedError("mask", f"the model takes a part of a layer's mask, [{key}]: unsupported")
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # as Python asks for them, to see whether they are there
        text = f"the model works on a layer's mask as on a tensor ('{name}'), which burst never makes"
        raise _NoTensorError("mask", text)


# FSDP2's mixed precision replaces dataclasses among arguments by copies, field by field: these seem none.
del LayerMask.__dataclass_fields__, Mixing.__dataclass_fields__


class _NoTensorError(UnsupportedError, AttributeError):  # type: ignore[misc]  # both have a `name`
    """Of a mask that is asked for what a tensor has: `hasattr` says no."""


_current: list[Sequence] = []
"""The sequence whose forward runs. `SequenceParallel` sets it around the model's own forward."""


@contextmanager
def running(sequence: Sequence) -> Iterator[None]:
    """Make `sequence` the current one: within, masks are those of this sequence."""
    _current.append(sequence)
    try:
        yield
    finally:
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
    q_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | LayerMask | None = None,
    **_: Any,
) -> LayerMask:
    """transformers' mask interface: the mask of a kind of layers, from the function that describes it.

    Raises:
        UnsupportedError: it has other parts than causal attention, windows, chunks, blocks of tokens that
            see each other, and packed documents; or later tokens are seen outside of such blocks.
    """
    sequence = current()
    if sequence is None:
        where = 'attn_implementation="burst" works in forwards of models that burst has prepared'
        before = "generate makes masks before them for static caches, which are unsupported"
        raise UnsupportedError("attention outside of an engine", f"{where}. {before}: use a DynamicCache")
    if isinstance(attention_mask, LayerMask):
        return attention_mask
    if attention_mask is not None and sequence.entering is None and not bool(attention_mask.all()):
        raise UnsupportedError("attention_mask", "take padding out, by burst.shard_loader or cp.loader")
    masks = sequence.masks(mask_function, batch_size)
    if not all(map(_looks_back, masks)):
        raise UnsupportedError("mask", "the model asks for attention that is not causal")
    windows = (term.left for term in masks[0].all_terms() if isinstance(term, Window))
    window = min((left + 1 for left in windows if left is not None), default=None)
    if sequence.columns.tree is not None:
        masks = (tree_mask(sequence.columns.tree, masks[0]),)
    return LayerMask(sequence, masks, window, int(q_offset))


def _read(function: Any, row: int, ends: tuple[int, ...]) -> Mask:
    """Return the mask of a row, whose documents are `ends`, that a function of transformers describes."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    name = name.removeprefix("transformers.masking_utils.").split(".<locals>")[0]
    closure = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if closure else ()
    variables = {variable: cell.cell_contents for variable, cell in zip(names, closure, strict=True)}
    match name:
        case "causal_mask_function":
            return Mask.causal()
        case "sliding_window_overlay":
            return Mask.window(int(variables["sliding_window"]) - 1, None)
        case "chunked_overlay":  # each document begins with a chunk
            size = int(variables["chunk_size"])
            if len(ends) == 2:
                return Mask.chunked(size) if size < ends[-1] else Mask.full()
            return Mask.documents([*chain(*(range(a, b, size) for a, b in pairwise(ends))), ends[-1]])
        case "blockwise_overlay":
            return _blocks(variables["block_sequence_ids"][row], row, ends)
        case "and_masks" | "or_masks":
            parts = (_read(part, row, ends) for part in variables["mask_functions"])
            return reduce(and_ if name == "and_masks" else or_, parts)
        case "packed_sequence_mask_function":
            return Mask.full()  # found in this rank's shard alone; `Sequence` has the documents of the whole
        case "remap_positions_for_packed_sequence" | "add_offsets_to_mask_function":
            return _read(variables["mask_function"], row, ends)
        case "padding_mask_function":
            return Mask.full()  # checked to hide nothing
        case _:
            raise UnsupportedError("mask", f"the model asks for a mask that is not supported: {name}")


def _blocks(ids: Tensor, row: int, ends: tuple[int, ...]) -> Mask:
    """Return the mask in which the tokens of a document that have one id, 0 or more, see each other."""
    if len(ids) != ends[-1] and bool((ids >= 0).any()):
        raise UnsupportedError("mask", f"the model makes blocks of {len(ids)} of {ends[-1]} tokens")
    numbers, counts = (x.tolist() for x in ids.unique_consecutive(return_counts=True))
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (first, last) in zip(numbers, pairwise(accumulate(counts, initial=0)), strict=True):
        if number >= 0:
            document = bisect(ends, first)
            if last > ends[document]:
                block = f"tokens [{first}, {last}) of row {row} are one block"
                raise UnsupportedError("mask", f"{block}, and a document ends at {ends[document]} within it")
            blocks.setdefault((document, number), []).append((first, last))
    pairs = [pair for runs in blocks.values() for pair in product(runs, runs)]
    return Mask.ranges([of_q for of_q, _ in pairs], [of_k for _, of_k in pairs])


def _looks_back(mask: Mask) -> bool:
    """Return whether no query sees a later key, other than in its block."""
    return any(
        isinstance(term, Ranges)
        or (isinstance(term, Window) and term.right == 0)
        or (isinstance(term, Union) and all(map(_looks_back, term.parts)))
        for term in mask.terms
    )


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
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [batch, heads, local sequence, head_dim], after rotary embedding. key, value: of the K/V heads.
        attention_mask: what `mask_of` made.

    Returns:
        [batch, local sequence, heads, value_dim], and None.

    Raises:
        UnsupportedError: the model asks for what this attention does not do; it is named.
    """
    name = type(module).__name__
    if not isinstance(attention_mask, LayerMask):
        kind = "no mask" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise UnsupportedError("model", f"{name} got {kind} that is not of transformers' mask interface")
    if dropout:
        raise UnsupportedError("dropout", f"{name} has attention dropout {dropout}: set attention_dropout=0")
    has_blocks = any(isinstance(term, Ranges) for mask in attention_mask.masks for term in mask.all_terms())
    if arguments.get("is_causal", getattr(module, "is_causal", True)) is False and not has_blocks:
        raise UnsupportedError("mask", f"{name} asks for attention that is not causal")
    if arguments.get("output_attentions"):
        raise UnsupportedError("output_attentions", "attention weights are never made")
    if sliding_window is not None and sliding_window != attention_mask.window:
        windows = f"a sliding_window of {sliding_window}, its mask one of {attention_mask.window}"
        raise UnsupportedError("mask", f"{name} has {windows}")
    unknown = [k for k, x in arguments.items() if isinstance(x, Tensor) and k not in UNDERSTOOD]
    if unknown:
        hands = f"{name} hands {', '.join(unknown)} to its attention, which is not supported"
        raise UnsupportedError("model", f"{hands}: leave out of the batch what the model need not have")
    sequence, masks = attention_mask.sequence, attention_mask.masks
    _note_arrival(sequence, module)
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding leaves q and k in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    sinks = arguments.get("s_aux")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling
    has_cache = attention_mask.offset or q.shape[1] != k.shape[1]
    tempers = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    if tempers and not has_cache and sequence.positions is not None:
        q = _tempered(module, q, sequence.positions)
    options: dict[str, Any] = {"topology": sequence.topology, "config": sequence.config, "softcap": softcap}
    attend_rows: Callable[..., Any] = partial(burst_attention, softmax_scale=scale, **options)
    if has_cache:
        attend_rows = partial(_attend_to_cache, layer_mask=attention_mask, scores=Scores(scale, softcap))
    rows = [slice(None)] if len(masks) == 1 else [slice(row, row + 1) for row in range(len(q))]
    outs = [
        attend_rows(q[at], k[at], v[at], mask=mask, sinks=sinks) for at, mask in zip(rows, masks, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs), None


def _attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None, layer_mask: LayerMask, scores: Scores
) -> Tensor:
    """Attend from a few new tokens to all keys of a cache, which every rank has, in plain torch."""
    if layer_mask.sequence.last is not None:  # each rank has a shard of the new tokens
        text = f"a forward over shards attends to {k.shape[1] - q.shape[1]} tokens of a cache"
        raise UnsupportedError("cache", f"{text} that was handed to the model inside (prefix tuning?)")
    end = layer_mask.offset + q.shape[1]
    queries = torch.arange(layer_mask.offset, end, device=q.device)
    keys = torch.arange(end - k.shape[1], end, device=q.device)  # a cache of a window forgets the first
    return attend_to_cache(q, k, v, mask.allows(queries, keys), scores, sinks)


def _tempered(module: Any, q: Tensor, places: Tensor) -> Tensor:
    """Return queries of Llama 4, scaled by their places in documents, and no more by those in the shard.

    q: [rows, tokens, heads, head_dim]; places: [rows, tokens].
    """

    def scale(at: Tensor) -> Tensor:
        steps = torch.floor((at + 1.0) / float(module.floor_scale))
        return 1.0 + float(module.attn_scale) * torch.log1p(steps)

    factor = scale(places) / scale(torch.arange(places.shape[1], device=places.device))
    return q * factor.to(q.device, q.dtype)[:, :, None, None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_arrival(sequence: Sequence, module: nn.Module) -> None:
    """Note that a module attended here; a compiled frame, that of many layers, would note the first."""
    sequence.reached.add(module)
