"""Other layouts than zigzag in Megatron: its batches and rotary positions sharded as burst attention expects.

Megatron shards zigzag wherever it shards a sequence over context-parallel ranks. For a model of attention
layers that goes through three functions. One slices a batch, two choose rotary positions, of plain and of
packed sequences. `use_layout` puts ours in their place. A model with a module that is not known to be blind
to layouts is refused.

This can go when Megatron asks for the layout in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
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
"""Classes of Megatron and TransformerEngine that work token by token, or shard through what `use_layout`
replaces. Any other module of a model may assume zigzag, and is refused beside another layout; torch's own may
not. (TransformerEngine's LayerNorm and RMSNorm are what Megatron's TENorm makes.)"""

SLICING = (
    "_get_batch_on_this_cp_rank_per_sequence_balancing",  # from 0.19 on
    "get_pretrain_batch_on_this_cp_rank",  # 0.18
    "get_batch_on_this_cp_rank",  # before; later this one shards packed batches too, by other functions
)
"""Megatron's function that shards a batch of unpacked sequences, by version."""

METADATA = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
"""Keys of a batch that are no sequences, whatever their shapes."""
TOKENS = ("tokens", "labels", "loss_mask", "position_ids")
"""Keys of a batch that are sequences; pipeline stages have some of them."""

PACKED = ("documents", "whole")


@dataclass(frozen=True)
class Sharding:
    """How Megatron shards sequences over context-parallel ranks."""

    layout: Layout = ZIGZAG
    packed: str = "documents"
    """Packed batches: "documents", each document zigzag by itself; or "whole", all tokens by the layout."""

    def __str__(self) -> str:
        return f"layout {self.layout}" + (" of whole packed batches" if self.packed == "whole" else "")

    def instead(self) -> str:
        """Return what makes it Megatron's own."""
        drops = "drop --dataloader-inter-document-masking (packed='whole')"
        changes = (self.layout != ZIGZAG, "use zigzag"), (self.packed == "whole", drops)
        return " and ".join(words for is_other, words in changes if is_other)


STOCK = Sharding()
"""Megatron's own."""

_in_effect = STOCK


def use_layout(layout: Layout | str, packed: str = "documents") -> None:
    """From now on Megatron shards batches and rotary positions over context-parallel ranks as `layout` says.

    For this process, on every rank, before the model is built; the launcher does it for `--burst-layout`.
    The core attention's BurstConfig must have the same layout. Batches are sharded in Megatron's
    `get_batch_on_this_cp_rank`; a script that shards them itself uses `burst_mcore.shard`. "zigzag" is
    Megatron's own.

    Args:
        layout: of sequences.
        packed: "documents" if packed batches are sharded document by document, zigzag, as for `--sft`.
            "whole" if they are sharded by `layout` like any sequence, as for
            `--dataloader-inter-document-masking`: documents may then end at any token. Each token keeps the
            rotary position that it has in its document.

    Raises:
        ValueError: no such layout, or one that belongs to a single batch; no such word.
    """
    global _in_effect
    layout = Layout.of(layout)
    if packed not in PACKED:
        raise ValueError(f"packed must be one of {', '.join(PACKED)}, got {packed!r}")
    if layout.kind == "zigzag-documents":
        raise ValueError(f"layout {layout} is of one packed batch, and Megatron's own there; legal: {NAMES}")
    sharding = Sharding(layout, packed)
    shard_sequences_alone()
    if sharding != STOCK:
        _install()
    _in_effect = sharding
    forget_rotary_positions()


def layout_of_packed() -> Layout | None:
    """Return the layout by which Megatron shards packed batches; None if it shards each document alone."""
    return _in_effect.layout if _in_effect.packed == "whole" else None


def refuse_other_layout(layout: Layout | str) -> None:
    """ValueError where a core attention of this layout would see the tokens, and positions, of another."""
    if layout != _in_effect.layout:
        raise ValueError(
            f"burst attention expects layout {layout}, but Megatron shards sequences and rotary positions "
            f"{_in_effect.layout} over the context-parallel group: call "
            f"burst_mcore.megatron.layouts.use_layout('{layout}') before the model is built (the launcher "
            f"does for --burst-layout), and give both the same layout"
        )


def refuse_assumed_zigzag(config: Any, sharding: Sharding | None = None) -> None:
    """ValueError where a configuration, or arguments, ask for what assumes zigzag beside another sharding."""
    sharding = sharding or _in_effect
    if sharding != STOCK:
        judge(of_sharding(Settings(config, sharding=sharding)))


def shard_sequences_alone() -> None:
    """From now on Megatron's slicing of a batch shards sequences alone, on any layout.

    A blend of data sets adds `dataset_id`, one number a sample: Megatron-Core 0.16 to 0.20 would shard such a
    key too, and ends with an IndexError.
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
    """Megatron's models that this version has and burst attention serves as whole language models."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # before 0.19
        from megatron.core.models.mamba import MambaModel

        return [GPTModel, MambaModel]
    return [GPTModel, HybridModel]


def forget_rotary_positions() -> None:
    """Empty Megatron's caches of rotary positions, which know neither layouts nor groups."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


@around
def _slicing(original: Callable[..., Any], batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Megatron's slicing of a batch: its sequences by the layout in effect, other keys whole."""
    tokens = {n for key in TOKENS for n in getattr(batch.get(key), "shape", ())[1:2]}
    sequences = {key: value for key, value in batch.items() if _is_sequence(key, value, tokens)}
    if _in_effect.layout == ZIGZAG:
        batch.update(original(sequences, cp_group=cp_group))
        return batch
    if cp_group is None:  # legal up to 0.16
        from megatron.core import parallel_state

        cp_group = parallel_state.get_context_parallel_group()
    for key, value in sequences.items():
        batch[key] = _sharded(value, _sequence_dim(key), cp_group)
    return batch


def _is_sequence(key: str, value: Any, tokens: set[int]) -> bool:
    """Return whether a key of a batch has a number for each token, of which samples have so many."""
    dim = _sequence_dim(key)
    if key in METADATA or not isinstance(value, Tensor) or value.dim() <= dim:
        return False
    return not tokens or value.shape[dim] in tokens


def _sequence_dim(key: str) -> int:
    return 2 if key == "attention_mask" else 1


@around
def _choosing_positions(
    original: Callable[..., Tensor], pos_emb: Tensor, seq_dim: int, cp_group: Any
) -> Tensor:
    """Megatron's choice of a rank's rows of the rotary embedding, by the layout in effect."""
    if _in_effect.layout == ZIGZAG or cp_group is None:
        return original(pos_emb, seq_dim, cp_group)
    return _sharded(pos_emb, seq_dim, cp_group)


def _choosing_positions_in_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's rotary embedding of packed tokens, whose documents may end at any token of a whole batch."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    names = tuple(signature(original).parameters)

    def embedded(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = {**dict(zip(names[3:], args, strict=False)), **kwargs}
        group = options.pop("cp_group", None)
        if _in_effect.packed == "documents" or group is None or group.size() == 1:
            return original(t, cu_seqlens, freqs, *args, **kwargs)  # type: ignore[no-any-return]
        options.pop("max_seqlen", None)
        tokens = t.shape[0] * group.size()
        of_batch = len(freqs) == tokens  # else of the longest document
        at = _positions_in_documents(cu_seqlens, tokens, group, of_batch)
        at = at.clamp(max=len(freqs) - 1)  # padding behind the last document may be longer than each document
        return _apply_rotary_pos_emb_bshd(t[:, None], freqs[at], **options)[:, 0]  # type: ignore[no-any-return]

    return embedded


_POSITIONS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def made_once(
    known: WeakIdKeyDictionary, sources: Sequence[Tensor | None], place: object, make: Callable[[], T]
) -> T:
    """Return make(), made anew only if one of the tensors was written to or is another, or `place` differs.

    For all layers, and for queries and keys: what was made last is kept while the first tensor lives.
    """
    if any(x is not None and x.is_inference() for x in sources):  # has no version
        return make()
    key = [(x is not None and (WeakIdRef(x), x._version)) for x in sources], place
    before: tuple[object, T] | None = known.get(sources[0])
    if before is None or before[0] != key:
        known[sources[0]] = before = key, make()
    return before[1]


def _positions_in_documents(cu_seqlens: Tensor, tokens: int, group: Any, of_batch: bool) -> Tensor:
    """Return positions [tokens of this rank], in the batch or in documents, on the device of cu_seqlens."""
    place = tokens, group.rank(), group.size(), _in_effect.layout, of_batch
    make = partial(_positions, cu_seqlens, tokens, group, of_batch)
    return made_once(_POSITIONS, [cu_seqlens], place, make)


def _positions(cu_seqlens: Tensor, tokens: int, group: Any, of_batch: bool) -> Tensor:
    at = positions(tokens, rank=group.rank(), size=group.size(), layout=_in_effect.layout)
    at, starts = at.to(cu_seqlens.device), cu_seqlens.to(at.dtype)
    return at if of_batch else at - starts[torch.searchsorted(starts, at, right=True) - 1]


def _sharded(x: Tensor, dim: int, group: Any) -> Tensor:
    n, size, layout = x.shape[dim], group.size(), _in_effect.layout
    if size == 1:
        return x
    if n % (divisor := layout.divisor(size)):
        raise ValueError(
            f"layout {layout} over {size} ranks needs sequences of a multiple of {divisor} tokens, "
            f"got {n} (--seq-length)"
        )
    return shard(x, dim, rank=group.rank(), size=size, layout=layout)


@around
def _refusing_unknown_modules(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a model's constructor: modules that may assume zigzag are refused beside another layout."""
    init(self, *args, **kwargs)
    refuse_unknown_modules(self, self.config.context_parallel_size)


def refuse_unknown_modules(model: Any, size: int) -> None:
    """ValueError beside another layout, if a module of `model` over `size` ranks may assume zigzag."""
    if _in_effect == STOCK or size == 1:
        return
    for name, module in model.named_modules():
        if not _ignores_layouts(type(module)):
            raise ValueError(
                f"{_in_effect} does not go with {type(module).__name__} ({name}), which may "
                f"assume that sequences are sharded zigzag: {_in_effect.instead()}"
            )


@around
def _refusing_unknown_models(
    init: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap the constructor of Megatron's modules: other models beside another layout are refused."""
    kind, size = type(self), getattr(config, "context_parallel_size", 1)
    if _in_effect != STOCK and size > 1 and _is_other_model(kind):
        raise ValueError(
            f"{_in_effect} does not go with {kind.__name__}, which may shard its sequences itself: "
            f"{_in_effect.instead()}"
        )
    init(self, config, *args, **kwargs)


def _is_other_model(kind: type) -> bool:
    """Return whether a class is, or extends, one of Megatron's models that may assume a layout."""
    models = (base for base in kind.__mro__ if base.__module__.startswith("megatron.core.models."))
    model = next(models, None)
    return model is not None and not _ignores_layouts(model)


def _ignores_layouts(kind: type) -> bool:
    """Return whether modules of this class work on any layout; a user's class of that name may not."""
    package = kind.__module__.split(".")[0]
    if package == "torch":
        return True
    return (
        package in ("megatron", "transformer_engine", "burst_mcore") and kind.__name__ in WORK_ON_ANY_LAYOUT
    )
