"""Other layouts than zigzag in Megatron: batches and rotary positions sharded for burst attention.

Megatron always shards sequences zigzag over context-parallel ranks. In a model of attention layers three
functions do: one slices a batch, two choose rotary positions, of plain and of packed sequences. `use_layout`
replaces them. Models with a module that may depend on the layout are not supported.

This can go when Megatron has one setting for the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from burst_mcore.layout import NAMES, Layout, positions, shard
from burst_mcore.megatron.rules import Settings, judge, of_sharding
from burst_mcore.wrap import around, wrap, wrap_everywhere

T = TypeVar("T")
ZIGZAG = Layout("zigzag")

WORK_ON_ANY_LAYOUT = frozenset(
    """
    GPTModel HybridModel TransformerBlock HybridStack TransformerLayer MoETransformerLayer MLPLayer
    SelfAttention MLASelfAttention BurstCoreAttention
    MLP TEFusedMLP SharedExpertMLP MoELayer SequentialMLP GroupedMLP TEGroupedMLP TEFusedMLPWithGroupedLinear
    TopKRouter InferenceTopKRouter
    ColumnParallelLinear RowParallelLinear ColumnParallelLinearGathered LinearCrossEntropyModule
    VocabParallelEmbedding LanguageModelEmbedding RotaryEmbedding YarnRotaryEmbedding
    LayerNorm RMSNorm FusedLayerNorm WrappedTorchNorm L2Norm IdentityOp IdentityFuncOp
    TENorm TEFusedResidualRMSNorm TEActivationOp TELMHeadColumnParallelLinear
    TELinear TEColumnParallelLinear TERowParallelLinear
    TELayerNormColumnParallelLinear TELayerNormColumnParallelLinearGathered
    TEGroupedLinear TEColumnParallelGroupedLinear TERowParallelGroupedLinear
    """.split()  # noqa: SIM905 -- 47 names are easier to read as words
)
"""Classes of Megatron and TransformerEngine that work token by token, or shard through the functions that
`use_layout` replaces. Any other module, except torch's, may assume zigzag, and raises with another layout.
(Megatron's TENorm makes TransformerEngine's LayerNorm and RMSNorm.)"""

SLICING = (
    "_get_batch_on_this_cp_rank_per_sequence_balancing",  # from 0.19 on
    "get_pretrain_batch_on_this_cp_rank",  # 0.18
    "get_batch_on_this_cp_rank",  # before; later this one shards packed batches too, by other functions
)
"""Megatron's function that shards a batch of unpacked sequences, by version."""

METADATA = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
"""Keys of a batch that are not sequences, whatever their shapes."""
TOKENS = ("tokens", "labels", "loss_mask", "position_ids")
"""Keys of a batch that are sequences; pipeline stages have some of these."""


@dataclass(frozen=True)
class Sharding:
    """The sharding of sequences over Megatron's context-parallel ranks."""

    layout: Layout = ZIGZAG
    packed: str = "documents"
    """The sharding of packed batches: "documents", each zigzag; or "whole", all tokens by the layout."""

    def __str__(self) -> str:
        return f"layout {self.layout}" + (" of whole packed batches" if self.packed == "whole" else "")

    def instead(self) -> str:
        """Return the changes that lead to Megatron's own sharding, for errors."""
        drops = "drop --dataloader-inter-document-masking (packed='whole')"
        changes = (self.layout != ZIGZAG, "use zigzag"), (self.packed == "whole", drops)
        return " and ".join(words for is_other, words in changes if is_other)


STOCK = Sharding()
"""Megatron's own sharding."""

_in_effect = STOCK


def use_layout(layout: Layout | str, packed: str = "documents") -> None:
    """Set the layout of Megatron's batches and rotary positions over context-parallel ranks.

    For this process; call it on every rank before the model is built. The launcher does so for
    `--burst-layout`. The core attention's BurstConfig must have the same layout. Batches are sharded in
    Megatron's `get_batch_on_this_cp_rank`; a script that shards batches itself uses `burst_mcore.shard`.
    "zigzag" is Megatron's own.

    Args:
        layout: of sequences.
        packed: "documents": packed batches are sharded document by document, zigzag, as for `--sft`.
            "whole": they are sharded by `layout` like any sequence, as for
            `--dataloader-inter-document-masking`: documents may then end at any token. Rotary positions
            count within documents.

    Raises:
        ValueError: an unknown layout, a layout of a single batch, or an unknown value of `packed`.
    """
    global _in_effect
    layout = Layout.of(layout)
    if packed not in ("documents", "whole"):
        raise ValueError(f"packed must be one of documents, whole, got {packed!r}")
    if layout.kind == "zigzag-documents":
        raise ValueError(f"layout {layout} is of one packed batch, and Megatron's own there; legal: {NAMES}")
    sharding = Sharding(layout, packed)
    shard_sequences_alone()
    if sharding != STOCK:
        _install()
    _in_effect = sharding
    forget_rotary_positions()


def layout_of_packed() -> Layout | None:
    """Return the layout of whole packed batches; None if each document is sharded separately."""
    return _in_effect.layout if _in_effect.packed == "whole" else None


def refuse_other_layout(layout: Layout | str, packed: str = "documents") -> None:
    """Raise ValueError unless Megatron's batches are sharded as a core attention and the flags expect."""
    packed = "whole" if packed == "whole" else _in_effect.packed
    if layout != _in_effect.layout or packed != _in_effect.packed:
        option = ", packed='whole'" * (packed == "whole")
        raise ValueError(
            f"burst attention expects {Sharding(Layout.of(layout), packed)}, but Megatron shards by "
            f"{_in_effect}: call burst_mcore.megatron.layouts.use_layout('{layout}'{option}) before the "
            f"model is built (the launcher and the patches do)"
        )


def refuse_assumed_zigzag(config: Any, sharding: Sharding | None = None) -> None:
    """Raise ValueError for settings that assume zigzag, if the sharding is another."""
    sharding = sharding or _in_effect
    if sharding != STOCK:
        judge(of_sharding(Settings(config, sharding=sharding)))


def shard_sequences_alone() -> None:
    """Patch Megatron's slicing of a batch to shard only sequences, on any layout.

    A blend of data sets adds `dataset_id`, one number a sample: Megatron-Core 0.16 to 0.20 would shard such a
    key, too, and end with an IndexError.
    """
    from megatron.core import utils

    wrap_everywhere(utils, next(name for name in SLICING if hasattr(utils, name)), _slicing)


def _install() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.module import MegatronModule

    wrap_everywhere(rope_utils, "get_pos_emb_on_this_cp_rank", _choosing_positions)
    wrap_everywhere(rope_utils, "_apply_rotary_pos_emb_thd", _choosing_positions_in_documents)
    for model in language_models():
        wrap(model, "__init__", _refusing_unknown_modules)
    wrap(MegatronModule, "__init__", _refusing_unknown_models)


def language_models() -> list[type]:
    """Return this Megatron's language models that burst attention supports."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # before 0.19
        from megatron.core.models.mamba import MambaModel

        return [GPTModel, MambaModel]
    return [GPTModel, HybridModel]


def forget_rotary_positions() -> None:
    """Clear Megatron's caches of rotary positions, which have neither layout nor group in their keys."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


@around
def _slicing(original: Callable, batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Wrap Megatron's slicing of a batch: sequences by the current layout, other keys whole."""
    tokens = {n for key in TOKENS for n in getattr(batch.get(key), "shape", ())[1:2]}
    dims = {key: 2 if key == "attention_mask" else 1 for key in batch if key not in METADATA}
    sequences = {key: batch[key] for key, dim in dims.items() if _is_sequence(batch[key], dim, tokens)}
    if _in_effect.layout == ZIGZAG:
        batch.update(original(sequences, cp_group=cp_group))
        return batch
    if cp_group is None:  # legal up to 0.16
        from megatron.core import parallel_state

        cp_group = parallel_state.get_context_parallel_group()
    for key, value in sequences.items():
        batch[key] = _sharded(value, dims[key], cp_group)
    return batch


def _is_sequence(value: Any, dim: int, tokens: set[int]) -> bool:
    """Return whether a value of a batch has a number for each token; tokens: legal lengths of samples."""
    has_dim = isinstance(value, Tensor) and value.dim() > dim
    return has_dim and (not tokens or value.shape[dim] in tokens)


@around
def _choosing_positions(original: Callable, pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Any:
    """Wrap Megatron's choice of a rank's rows of the rotary embedding: by the current layout."""
    if _in_effect.layout == ZIGZAG or cp_group is None:
        return original(pos_emb, seq_dim, cp_group)
    return _sharded(pos_emb, seq_dim, cp_group)


@around
def _choosing_positions_in_documents(
    original: Callable, t: Tensor, cu_seqlens: Tensor, freqs: Tensor, **options: Any
) -> Any:
    """Wrap Megatron's rotary embedding of packed tokens: in a whole batch documents may end at any token."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    cp_group = options.get("cp_group")
    if _in_effect.packed == "documents" or cp_group is None or cp_group.size() == 1:
        return original(t, cu_seqlens, freqs, **options)
    options = {name: x for name, x in options.items() if name not in ("cp_group", "max_seqlen")}
    tokens = t.shape[0] * cp_group.size()
    of_batch = len(freqs) == tokens  # else of the longest document
    offsets = _positions_in_documents(cu_seqlens, tokens, cp_group, of_batch)
    offsets = offsets.clamp(max=len(freqs) - 1)  # padding at the end may be longer than any document
    return _apply_rotary_pos_emb_bshd(t[:, None], freqs[offsets], **options)[:, 0]


_POSITIONS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def made_once(
    cache: WeakIdKeyDictionary, sources: Sequence[Tensor | None], place: object, make: Callable[[], T]
) -> T:
    """Return make(), cached until a tensor was written to or replaced, or `place` differs.

    For all layers, and for queries and keys: the last result lives as long as the first tensor.
    """
    if any(x is not None and x.is_inference() for x in sources):  # has no version
        return make()
    key = [(x is not None and (WeakIdRef(x), x._version)) for x in sources], place
    before: tuple[object, T] | None = cache.get(sources[0])
    if before is None or before[0] != key:
        cache[sources[0]] = before = key, make()
    return before[1]


def _positions_in_documents(cu_seqlens: Tensor, tokens: int, group: Any, of_batch: bool) -> Tensor:
    """Return positions [tokens of this rank], in the batch or in documents, on the device of cu_seqlens."""
    rank, size, layout = group.rank(), group.size(), _in_effect.layout

    def make() -> Tensor:
        offsets = positions(tokens, rank=rank, size=size, layout=layout)
        offsets, starts = offsets.to(cu_seqlens.device), cu_seqlens.to(offsets.dtype)
        return offsets if of_batch else offsets - starts[torch.searchsorted(starts, offsets, right=True) - 1]

    return made_once(_POSITIONS, [cu_seqlens], (tokens, rank, size, layout, of_batch), make)


def _sharded(x: Tensor, dim: int, group: Any) -> Tensor:
    n, size, layout = x.shape[dim], group.size(), _in_effect.layout
    if size == 1:
        return x
    if n % (divisor := layout.divisor(size)):
        raise ValueError(
            f"layout {layout} over {size} ranks needs a multiple of {divisor} tokens, got {n} (--seq-length)"
        )
    return shard(x, dim, rank=group.rank(), size=size, layout=layout)


@around
def _refusing_unknown_modules(init: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a model's constructor: with another layout, modules that may assume zigzag raise."""
    init(self, *args, **kwargs)
    refuse_unknown_modules(self, self.config.context_parallel_size)


def refuse_unknown_modules(model: Any, size: int) -> None:
    """Raise ValueError if the layout is not zigzag and a module of `model` may assume zigzag."""
    if _in_effect == STOCK or size == 1:
        return
    for name, module in model.named_modules():
        if not _ignores_layouts(type(module)):
            raise ValueError(
                f"{_in_effect} does not go with {type(module).__name__} ({name}), which may "
                f"assume that sequences are sharded zigzag: {_in_effect.instead()}"
            )


@around
def _refusing_unknown_models(init: Callable, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of Megatron's modules: with another layout, other models raise."""
    kind, size = type(self), getattr(config, "context_parallel_size", 1)
    models = (base for base in kind.__mro__ if base.__module__.startswith("megatron.core.models."))
    model = next(models, None)
    if _in_effect != STOCK and size > 1 and model is not None and not _ignores_layouts(model):
        raise ValueError(
            f"{_in_effect} does not go with {kind.__name__}, which may shard its sequences itself: "
            f"{_in_effect.instead()}"
        )
    init(self, config, *args, **kwargs)


def _ignores_layouts(kind: type) -> bool:
    """Return whether modules of this class work on any layout; a user's class of the same name may not."""
    package = kind.__module__.split(".")[0]
    is_named = package in ("megatron", "transformer_engine", "burst_mcore")
    return package == "torch" or (is_named and kind.__name__ in WORK_ON_ANY_LAYOUT)
