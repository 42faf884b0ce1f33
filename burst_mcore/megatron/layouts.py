"""Other layouts than zigzag in Megatron: its batches and rotary positions dealt as burst attention expects.

Megatron deals zigzag wherever it deals a sequence over context-parallel ranks. For a model of attention
layers that goes through two functions, which slice a batch and choose rotary positions: `use_layout` puts
ours in their place. Layers that assume zigzag elsewhere refuse to be built beside another layout.

This can go when Megatron asks for the layout in one place.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from burst_mcore.layout import NAMES, Layout, shard
from burst_mcore.megatron.patch import wrap, wrap_everywhere

ZIGZAG = Layout("zigzag")

ASSUME_ZIGZAG = {
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock": "multi-token prediction",
    "megatron.core.ssm.mamba_mixer:MambaMixer": "Mamba",
    "megatron.core.ssm.gated_delta_net:GatedDeltaNet": "gated delta net (GDN)",
    "megatron.core.transformer.experimental_attention_variant.dsa:DSAttention": "sparse attention (DSA)",
    "megatron.core.extensions.transformer_engine:TEDotProductAttention": "TransformerEngine's attention",
}
"""Classes of layers that take their ranks' tokens for zigzag, and what they are called."""

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

    # From 0.19 on the second also deals packed batches, each document zigzag, through other functions.
    inner = "_get_batch_on_this_cp_rank_per_sequence_balancing"
    slicing = inner if hasattr(utils, inner) else "get_batch_on_this_cp_rank"
    wrap_everywhere(utils, slicing, _slicing)
    wrap_everywhere(rope_utils, "get_pos_emb_on_this_cp_rank", _choosing_positions)
    for path in ASSUME_ZIGZAG:
        owner = _class(path)
        if owner is not None:
            wrap(owner, "__init__", _refusing_other_layouts)


def _class(path: str) -> type | None:
    """The class, if this Megatron has it and what it needs is installed."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None  # without TransformerEngine there is a mock


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


def _refusing_other_layouts(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a layer that assumes zigzag."""
    signature = inspect.signature(init)
    names = {path.partition(":")[2]: name for path, name in ASSUME_ZIGZAG.items()}

    def refusing(*args: Any, **kwargs: Any) -> None:
        config = signature.bind(*args, **kwargs).arguments["config"]
        if _in_effect != ZIGZAG and config.context_parallel_size > 1:
            layer = next(base.__name__ for base in type(args[0]).__mro__ if base.__name__ in names)
            raise ValueError(
                f"layout {_in_effect} does not go with {names[layer]}: {layer} assumes that sequences are "
                f"dealt zigzag; use zigzag"
            )
        init(*args, **kwargs)

    return refusing
