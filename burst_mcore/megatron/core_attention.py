"""The core attention module: Megatron's contract outside, burst_attention inside.

Letters: S local sequence, B batch, H heads on this tensor-parallel rank, D head dim.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from burst_mcore.attention.function import burst_attention, connect
from burst_mcore.attention.mask import Mask
from burst_mcore.attention.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, positions
from burst_mcore.rates import Rates

_last_checked: tuple[weakref.ref[Tensor], Mask] | None = None
"""The attention mask that was found to say the same as this mask."""


class BurstCoreAttention(MegatronModule):  # type: ignore[misc]  # Megatron is untyped
    """Core attention over Megatron's own context-parallel group.

    Stands where DotProductAttention or TEDotProductAttention stand in a layer spec, with their constructor,
    plus `burst_config` and, for its choices called "auto", `rates`. Holds no parameters. With a
    context-parallel size of 1 it attends locally. The ring, and on NCCL its communicators, are made here,
    once for each group.

    Raises:
        ValueError: the model asks for what this attention does not do (dropout, cross attention, windows,
            sinks, ...): at construction, before any training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        burst_config: BurstConfig | None = None,
        rates: Rates | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.burst_config = burst_config or BurstConfig()
        self.mask = _mask(attn_mask_type, layer_number)
        head_dim = k_channels if k_channels is not None else config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refuse_unsupported(config, attention_type, dropout, cp_comm_type, layer_number)
        # Last: these may make communicators.
        self.topology = replace(_topology(config, pg_collection, self.burst_config.ring), rates=rates)
        _refuse_other_layout(self.burst_config, self.topology)
        connect(self.topology, self.burst_config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [S, B, H, D]. key: [S, B, Hkv, D]. value: [S, B, Hkv, Dv], K/V heads not repeated.
            attention_mask: None, or Megatron's [1 or B, 1, S, global sequence], True where masked. It must
                say the same as the mask type, which is what is used; this is checked.
            attn_mask_type: overrides the one given at construction.
            attention_bias, packed_seq_params: must be None.

        Returns:
            [S, B, H * Dv].

        Raises:
            ValueError: anything that is not supported; see also `burst_attention`.
        """
        if attention_bias is not None:
            raise ValueError(f"layer {self.layer_number}: burst attention takes no attention bias")
        if packed_seq_params is not None:
            raise ValueError(f"layer {self.layer_number}: burst attention takes no packed sequences yet")
        mask = self.mask if attn_mask_type is None else _mask(attn_mask_type, self.layer_number)
        if attention_mask is not None:
            self._refuse_other_mask(attention_mask, mask, query.shape[0])
        out = burst_attention(
            *(x.transpose(0, 1) for x in (query, key, value)),
            topology=self.topology,
            mask=mask,
            softmax_scale=self.softmax_scale,
            config=self.burst_config,
        )
        assert isinstance(out, Tensor)
        return out.transpose(0, 1).flatten(2)

    def _refuse_other_mask(self, attention_mask: Tensor, mask: Mask, local_rows: int) -> None:
        global _last_checked
        if _last_checked is not None and _last_checked[0]() is attention_mask and _last_checked[1] == mask:
            return  # the layers of a model get the same tensor
        n = local_rows * self.topology.size
        if attention_mask.shape[-2:] != (local_rows, n):
            raise ValueError(
                f"layer {self.layer_number}: attention_mask must be [..., {local_rows}, {n}] (local queries "
                f"x all keys), got {tuple(attention_mask.shape)}"
            )
        at = positions(n, rank=self.topology.rank, size=self.topology.size, layout=self.burst_config.layout)
        allowed = mask.allows(at, torch.arange(n)).to(attention_mask.device)
        if not bool((attention_mask == ~allowed).all()):
            raise ValueError(
                f"layer {self.layer_number}: attention_mask is not {mask}: masks of documents "
                f"(--reset-attention-mask) and padding are not supported yet"
            )
        _last_checked = weakref.ref(attention_mask), mask


def refuse_unsupported(
    config: TransformerConfig,
    attention_type: str,
    dropout: float,
    cp_comm_type: str | None,
    layer_number: int,
) -> None:
    """ValueError for what a model may ask of its core attention and this one does not do."""
    asked = {
        f"attention dropout {dropout} (pass --attention-dropout 0)": dropout > 0,
        f"attention of type {attention_type!r}, it does self attention": attention_type != "self",
        f"cp_comm_type {cp_comm_type!r}: the ring is its own way to communicate (leave out --cp-comm-type)": (
            cp_comm_type not in (None, "p2p", "burst")  # "p2p" is Megatron's default
        ),
        f"window_size {getattr(config, 'window_size', None)}": getattr(config, "window_size", None)
        is not None,
        "a softmax other than 'vanilla' (sinks)": getattr(config, "softmax_type", "vanilla") != "vanilla",
        "qk_clip and log_max_attention_logit: it does not keep the largest logits": (
            getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        ),
        "hybrid (dynamic) context parallelism": getattr(config, "hybrid_context_parallel", False),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"layer {layer_number}: burst attention does not support {what}")


def _refuse_other_layout(config: BurstConfig, topology: Topology) -> None:
    if topology.size > 1 and config.layout != Layout("zigzag"):
        raise ValueError(
            f"Megatron deals the sequence and the rotary positions zigzag over the context-parallel group; "
            f"layout {config.layout} would attend to the wrong positions: use zigzag"
        )


def _mask(attn_mask_type: AttnMaskType, layer_number: int) -> Mask:
    if attn_mask_type == AttnMaskType.causal:
        return Mask.causal()
    if attn_mask_type == AttnMaskType.no_mask:
        return Mask.full()
    raise ValueError(
        f"layer {layer_number}: burst attention takes mask types causal and no_mask, got {attn_mask_type}"
    )


def _topology(config: TransformerConfig, pg_collection: Any, ring: str) -> Topology:
    """The ring over Megatron's own groups: hierarchical ones if there are, else the context-parallel one."""
    group = getattr(pg_collection, "cp", None)
    if group is None:
        group = parallel_state.get_context_parallel_group(check_initialized=False)
    size = group.size() if group is not None else 1
    if size != config.context_parallel_size:
        raise ValueError(
            f"the model's context_parallel_size is {config.context_parallel_size}, but its context-parallel "
            f"process group has {size} ranks"
        )
    if size == 1:
        return Topology.single()
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if not sizes:
        return _nodes_by_host(group, ring)
    levels = getattr(pg_collection, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups(
        check_initialized=False
    )
    if len(sizes) != 2 or not levels or [level.size() for level in levels] != list(sizes):
        found = [level.size() for level in levels or ()]
        raise ValueError(
            f"burst attention takes two hierarchical context-parallel sizes, ranks of a node and nodes, with "
            f"their process groups; got sizes {list(sizes)} and groups of {found}"
        )
    return Topology.from_groups(intra=levels[0], inter=levels[1])


def _nodes_by_host(group: Any, ring: str) -> Topology:
    try:
        return Topology.from_group(group)
    except ValueError as error:
        if ring == "flat":  # it needs no nodes
            return Topology.from_group(group, intra_size=group.size())
        raise ValueError(
            f"{error} (in Megatron: --hierarchical-context-parallel-sizes L M, or --burst-ring flat)"
        ) from error
