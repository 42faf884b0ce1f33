"""Other layouts than zigzag in Megatron: its batches and rotary positions dealt as burst attention expects.

Megatron deals zigzag wherever it deals a sequence over context-parallel ranks. For a model of attention
layers that goes through two functions, which slice a batch and choose rotary positions: `use_layout` puts
ours in their place. A model with any other module than those known to be blind to layouts is refused.

This can go when Megatron asks for the layout in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from burst_mcore.layout import NAMES, Layout, shard
from burst_mcore.megatron.patch import wrap, wrap_everywhere

ZIGZAG = Layout("zigzag")

BLIND_TO_LAYOUTS = frozenset(
    (
        *("GPTModel", "HybridModel", "TransformerBlock", "HybridStack", "TransformerLayer"),
        *("MoETransformerLayer", "MLPLayer", "SelfAttention", "MLASelfAttention", "BurstCoreAttention"),
        *("MLP", "TEFusedMLP", "SharedExpertMLP", "MoELayer", "SequentialMLP", "GroupedMLP", "TEGroupedMLP"),
        *("TopKRouter", "InferenceTopKRouter", "ColumnParallelLinear", "RowParallelLinear"),
        *("VocabParallelEmbedding", "LanguageModelEmbedding", "RotaryEmbedding", "YarnRotaryEmbedding"),
        *("LayerNorm", "RMSNorm", "TEFusedResidualRMSNorm", "TELMHeadColumnParallelLinear", "TEActivationOp"),
        *(
            "TEFusedMLPWithGroupedLinear",
            "TELinear",
            "TEColumnParallelLinear",
            "TERowParallelLinear",
            "TELayerNormColumnParallelLinear",
        ),
        *("TEGroupedLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TENorm"),
        *("IdentityOp", "IdentityFuncOp", "FusedLayerNorm", "WrappedTorchNorm", "L2Norm"),
    )
)
"""Classes of Megatron and TransformerEngine that work token by token, or deal through what `use_layout`
replaces. Any other module of a model may assume zigzag, and is refused beside another layout; torch's own may
not. (TransformerEngine's LayerNorm and RMSNorm are what Megatron's TENorm makes.)"""

METADATA = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
"""What is in a batch and has no tokens."""

_in_effect = ZIGZAG


def use_layout(layout: Layout | str) -> None:
    """From now on Megatron deals batches and rotary positions over context-parallel ranks as `layout` says.

    For this process, on every rank, before the model is built; the launcher does it for `--burst-layout`.
    The core attention's BurstConfig must have the same layout. Batches are dealt in Megatron's
    `get_batch_on_this_cp_rank`; a script that deals them itself uses `burst_mcore.shard`. "zigzag" is
    Megatron's own.

    Raises:
        ValueError: no such layout, or one that belongs to a single batch.
    """
    global _in_effect
    layout = Layout.of(layout)
    if layout.kind == "zigzag-documents":
        raise ValueError(
            f"layout {layout} is that of one packed batch, and Megatron's own there; legal: {NAMES}"
        )
    if layout != ZIGZAG:
        _install()
    _in_effect = layout
    _forget_rotary_positions()


def layout_in_effect() -> Layout:
    """How Megatron deals sequences in this process."""
    return _in_effect


def refuse_other_layout(layout: Layout | str, config: Any) -> None:
    """ValueError where a core attention of this layout and this model would see wrong positions.

    Args:
        layout: the core attention's.
        config: the model's TransformerConfig.
    """
    if layout != _in_effect:
        raise ValueError(
            f"burst attention expects layout {layout}, but Megatron deals sequences and rotary positions "
            f"{_in_effect} over the context-parallel group: call "
            f"burst_mcore.megatron.layouts.use_layout('{layout}') before the model is built (the launcher "
            f"does for --burst-layout), and give both the same layout"
        )
    refuse_assumed_zigzag(Layout.of(layout), config)


def refuse_assumed_zigzag(layout: Layout, config: Any) -> None:
    """ValueError where something that a TransformerConfig, or the arguments, ask for assumes zigzag."""
    if layout == ZIGZAG:
        return
    variant = getattr(config, "experimental_attention_variant", None)
    assuming = {
        "multi-token prediction (--mtp-num-layers)": getattr(config, "mtp_num_layers", None),
        "fused rope (pass --no-rope-fusion)": getattr(config, "apply_rope_fusion", False),
        f"--experimental-attention-variant {variant}": variant,
    }
    for what, is_asked in assuming.items():
        if is_asked:
            raise ValueError(f"layout {layout} does not go with {what}, which assumes zigzag: use zigzag")


def _install() -> None:
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.module import MegatronModule

    # From 0.19 on the second also deals packed batches, each document zigzag, through other functions.
    inner = "_get_batch_on_this_cp_rank_per_sequence_balancing"
    slicing = inner if hasattr(utils, inner) else "get_batch_on_this_cp_rank"
    wrap_everywhere(utils, slicing, _slicing)
    wrap_everywhere(rope_utils, "get_pos_emb_on_this_cp_rank", _choosing_positions)
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


def _forget_rotary_positions() -> None:
    """Empty Megatron's caches of them."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


def _slicing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's slicing of a batch, by the layout in effect."""

    def sliced(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
        if _in_effect == ZIGZAG:
            return original(batch, cp_group=cp_group)  # type: ignore[no-any-return]
        if cp_group is None:  # legal up to 0.16
            from megatron.core import parallel_state

            cp_group = parallel_state.get_context_parallel_group()
        for key, value in batch.items():
            if value is not None and key not in METADATA:
                batch[key] = _dealt(value, 2 if key == "attention_mask" else 1, cp_group)
        return batch

    return sliced


def _choosing_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's choice of a rank's rows of the rotary embedding, by the layout in effect."""

    def chosen(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        if _in_effect == ZIGZAG or cp_group is None:
            return original(pos_emb, seq_dim, cp_group)  # type: ignore[no-any-return]
        return _dealt(pos_emb, seq_dim, cp_group)

    return chosen


def _dealt(x: Tensor, dim: int, group: Any) -> Tensor:
    n, size = x.shape[dim], group.size()
    if size == 1:
        return x
    if n % (divisor := _in_effect.divisor(size)):
        raise ValueError(
            f"layout {_in_effect} over {size} ranks needs sequences of a multiple of {divisor} tokens, "
            f"got {n} (--seq-length)"
        )
    return shard(x, dim, rank=group.rank(), size=size, layout=_in_effect)


def _refusing_unknown_modules(init: Callable[..., None]) -> Callable[..., None]:
    """A model's constructor, which refuses modules that may assume zigzag beside another layout."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _in_effect == ZIGZAG or self.config.context_parallel_size == 1:
            return
        for name, module in self.named_modules():
            if not _is_blind(type(module)):
                raise ValueError(
                    f"layout {_in_effect} does not go with {type(module).__name__} ({name}), which may "
                    f"assume that sequences are dealt zigzag: use zigzag"
                )

    return refusing


def _refusing_unknown_models(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of all of Megatron's modules, which refuses its other models beside another layout."""

    def refusing(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind, size = type(self), getattr(config, "context_parallel_size", 1)
        if _in_effect != ZIGZAG and size > 1 and _is_other_model(kind):
            raise ValueError(
                f"layout {_in_effect} does not go with {kind.__name__}, which may deal its sequences itself: "
                f"use zigzag"
            )
        init(self, config, *args, **kwargs)

    return refusing


def _is_other_model(kind: type) -> bool:
    """Whether a class is, or extends, one of Megatron's models that is not known to work on any layout."""
    models = (base for base in kind.__mro__ if base.__module__.startswith("megatron.core.models."))
    model = next(models, None)
    return model is not None and not _is_blind(model)


def _is_blind(kind: type) -> bool:
    """Whether modules of this class work on any layout; a user's own class of the same name may not."""
    package = kind.__module__.split(".")[0]
    if package == "torch":
        return True
    return package in ("megatron", "transformer_engine", "burst_mcore") and kind.__name__ in BLIND_TO_LAYOUTS
