"""The core attention module: Megatron's contract outside, burst_attention inside.

Letters: S local sequence, B batch, H heads on this tensor-parallel rank, D head dim, T local tokens of packed
documents.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.kernels.kernel import Scores
from burst_mcore.attention.kernels.reference import attend_to_cache
from burst_mcore.attention.numerics.latent import Latent
from burst_mcore.attention.replay import entered, of_layer
from burst_mcore.attention.resolve import connect
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import positions
from burst_mcore.mask import Mask
from burst_mcore.megatron import layouts, rules
from burst_mcore.megatron.arguments import command_line, packed_of
from burst_mcore.megatron.checks import configured, refuse_dense_mask, with_kernel
from burst_mcore.megatron.latent import hand_over_latents
from burst_mcore.megatron.packed import Packing, packing, roll_within_slots
from burst_mcore.megatron.patched.groups import Rebindable, follow_groups
from burst_mcore.rates import Rates
from burst_mcore.rollouts.megatron import mask_of_call

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
FULL = (AttnMaskType.no_mask, AttnMaskType.padding)
PADDING = (AttnMaskType.padding, AttnMaskType.padding_causal)
"""Mask types that need packed sequences, which define the padding."""

_CHECKED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Attention masks that were checked to equal a mask, on this rank of a ring."""


class BurstCoreAttention(Rebindable):
    """Core attention over Megatron's own context-parallel group.

    It replaces DotProductAttention or TEDotProductAttention in a layer spec, with their constructor, plus
    `burst_config` and, for its options "auto", `rates`. With `mla_latent` "on" or "auto" an MLA layer passes
    its latent. The only parameter is `softmax_offset`, if softmax_type is learnable. With a context-parallel
    size of 1 it attends locally. The ring, and on NCCL its communicators, are made here, once for each group;
    for the group of a call, in its first call, and for a group bound later (`cp_group`, `pg_collection`,
    `set_context_parallel_group`), then.

    Raises:
        ValueError: an unsupported setting of the model (dropout, cross attention, ...), at construction.
    """

    current_max_attn_logits: Tensor | None = None
    """The max logit of each head since Megatron's `clip_qk` last read it, over this rank's queries."""

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
        mla_latent: str = "off",
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        settings = rules.Settings(config, attention_type=attention_type, attention_dropout=dropout)
        rules.judge(rules.of_layer(settings, mla_latent), f"layer {layer_number}: ")
        self.layer_number, self.mla_latent = layer_number, mla_latent
        self.attn_mask_type = _legal(attn_mask_type, layer_number)
        self.window = _window(config, layer_number)
        head_dim = k_channels if k_channels is not None else config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        self._asked, self.cp_comm_type, self._rates = burst_config or BurstConfig(), cp_comm_type, rates
        self._head_dims = head_dim, head_dim if v_channels is None else v_channels
        self._keeps_largest = any(getattr(config, x, False) for x in ("qk_clip", "log_max_attention_logit"))
        self.softmax_offset = _sinks(config, pg_collection)
        self.up_weight: Callable[[], Tensor] | None = None
        """Returns the up-projection [H, R, Dk + Dv] of a layer that passes its latent and rope key."""
        if mla_latent != "off":
            hand_over_latents()
        if getattr(config, "mtp_num_layers", None):
            roll_within_slots()
        follow_groups()
        # Last: these may make communicators.
        self._topologies: dict[Any, Topology] = {}
        self._pg_collection = pg_collection
        group = _group(config, pg_collection)
        self.is_alone = group is not None and group.size() > config.context_parallel_size == 1
        group = None if self.is_alone else group
        self.use_group(group, cp_comm_type, _levels(config, group, pg_collection))

    def use_group(self, group: Any, cp_comm_type: str | None, levels: Any = None) -> None:
        """Attend over `group`, see `Rebindable`. A ValueError, as in the constructor, changes nothing."""
        size = 1 if group is None else group.size()
        burst = configured(self._asked, self.config, cp_comm_type, size)
        if size > 1:
            layouts.shard_sequences_alone()
            layouts.refuse_other_layout(burst.layout, packed_of(command_line()))
            layouts.refuse_assumed_zigzag(self.config)
        topology = self._topology_over(group, burst, levels)
        mask = (Mask.causal() if self.attn_mask_type in CAUSAL else Mask.full()) & self.window
        try:
            ranks = Ranks(topology.size, topology.intra_size)
            burst = with_kernel(burst, self.config, ranks, mask, self._head_dims)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_number}: {error}") from error
        connect(topology, burst)
        self._cp_group, self.cp_comm_type = group, cp_comm_type
        self.topology, self.burst_config = topology, burst

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
            query: [S, B, H, D]. key: [S, B, Hkv, D]. value: [S, B, Hkv, Dv], K/V heads not repeated. Packed
                (thd): [T, H, D], [T, Hkv, D], [T, Hkv, Dv], or with a batch of 1 after T. Of an MLA layer
                with `up_weight`: the latent [S, B, 1, R], and [S, B, 1, D] that ends in the rope key.
            attention_mask: None, or Megatron's [1 or B, 1, S, global sequence], True where masked. It must
                equal the mask of the mask type, which is used; this is checked. None if packed.
            attn_mask_type: overrides the constructor's. The window comes from the config.
            attention_bias: must be None.
            packed_seq_params: the documents of packed sequences (format thd), each sharded zigzag over the
                ranks, or all together by the layout (`layouts.use_layout`); and this call's
                context-parallel group, if it has its own; and its tree (`burst_mcore.rollouts.megatron`).

        Returns:
            [S, B, H * Dv]; packed [T, H * Dv], with a batch of 1 if the query has one.

        Raises:
            ValueError: anything that is not supported; see also `burst_attention`.
        """
        if attention_bias is not None:
            raise ValueError(f"layer {self.layer_number}: burst attention takes no attention bias")
        kind = self.attn_mask_type if attn_mask_type is None else _legal(attn_mask_type, self.layer_number)
        topology = self._topology_of_call(packed_seq_params)
        batch = self._packing(packed_seq_params, query.shape[0] * topology.size, topology.size)
        if batch is not None and attention_mask is not None:
            raise ValueError(f"layer {self.layer_number}: attention_mask must be None for packed sequences")
        if batch is None and kind in PADDING:
            raise ValueError(
                f"layer {self.layer_number}: mask type {kind} needs packed sequences (PackedSeqParams of "
                f"format thd), which say what is padding; without padding use causal or no_mask"
            )
        if batch is None and query.shape[0] != key.shape[0]:
            return self._decode(query, key, value, attention_mask, topology)
        if topology.size > 1:
            layouts.refuse_other_layout(self.burst_config.layout)
        mask, config = Mask.causal() if kind in CAUSAL else Mask.full(), self.burst_config
        if attention_mask is not None:
            check = partial(self._refuse_other_mask, attention_mask, mask, query.shape[0], topology)
            layouts.made_once(_CHECKED, [attention_mask], (mask, topology), check)  # for all layers
        if batch is not None:
            mask, config = mask & batch.documents, replace(config, layout=batch.layout)
        q, k, v = (_batch_first(x, batch is not None) for x in (query, key, value))
        # Only in checkpoints: under torch.compile a layer's name would compile each layer separately.
        with of_layer(f"layer {self.layer_number}") if entered.in_checkpoint else contextlib.nullcontext():
            out = burst_attention(
                q,
                **self._keys(k, v),
                topology=topology,
                mask=mask_of_call(packed_seq_params, mask & self.window, self.window),
                config=config,
                softmax_scale=self.softmax_scale,
                sinks=self.softmax_offset,
                return_max_logit=self._keeps_largest,
            )
        if self._keeps_largest:
            out, max_logit = out
            previous = self.current_max_attn_logits
            self.current_max_attn_logits = max_logit if previous is None else max_logit.maximum(previous)
        assert isinstance(out, Tensor)
        return out[0].flatten(1) if query.dim() == 3 else out.transpose(0, 1).flatten(2)

    def _keys(self, k: Tensor, v: Tensor) -> dict[str, Any]:
        """Return K and V, or the latent, as arguments of burst_attention."""
        if self.up_weight:
            rope_key = v[..., -self.config.qk_pos_emb_head_dim :]
            return {"latent": Latent(k[:, :, 0], rope_key, self.up_weight(), self.mla_latent)}
        if self.mla_latent == "on" and self.training:
            raise ValueError(
                f"layer {self.layer_number}: --burst-mla-latent on needs the latent, and this layer gave "
                f"K and V: its class replaces how MLASelfAttention makes them; use auto or off"
            )
        return {"k": k, "v": v}

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return the state for distributed checkpoints, like Megatron's attention: learnt sinks, by head."""
        learnt = isinstance(self.softmax_offset, torch.nn.Parameter)
        state = self.state_dict(prefix="", keep_vars=True) if learnt else {}
        of_heads, group = {"softmax_offset": 0}, (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            state, prefix, of_heads, sharded_offsets, dp_cp_group=group
        )

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, topology: Topology
    ) -> Tensor:
        """Attend the last tokens of a sequence to the cache of all its keys, as in generation.

        The layer's mask type counts: Megatron passes no_mask with the call, whatever the layer's type.
        """
        if topology.size > 1:
            raise ValueError(
                f"layer {self.layer_number}: burst attention does not decode with a cache under context "
                f"parallelism ({query.shape[0]} tokens, {key.shape[0]} keys): use --context-parallel-size 1"
            )
        (new, n), device = (query.shape[0], key.shape[0]), query.device
        mask = (Mask.causal() if self.attn_mask_type in CAUSAL or new == 1 else Mask.full()) & self.window
        sees = mask.allows(torch.arange(n - new, n, device=device), torch.arange(n, device=device))
        if attention_mask is not None and not bool((attention_mask.expand(1, 1, new, n) == ~sees).all()):
            raise ValueError(
                f"layer {self.layer_number}: burst attention decodes by the layer's own mask "
                f"({self.attn_mask_type}, window {self.window}): the attention_mask that came is another"
            )
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = attend_to_cache(q, k, v, sees, Scores(self.softmax_scale), self.softmax_offset)
        return out.transpose(0, 1).flatten(2)

    def _packing(self, params: Any, n: int, size: int) -> Packing | None:
        try:
            return None if params is None else packing(params, n, size, self.burst_config.layout)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_number}: {error}") from error

    def _topology_of_call(self, params: Any) -> Topology:
        """Return the ring of a call: over the model's group, or the call's own."""
        group, size = (getattr(params, name, None) for name in ("cp_group", "local_cp_size"))
        if group is None and size in (None, 1):
            return self.topology if size is None else Topology.single()
        if group is None or (size is not None and size != group.size()):
            actual = "no cp_group" if group is None else f"a cp_group of {group.size()} ranks"
            raise ValueError(f"layer {self.layer_number}: the call has local_cp_size {size}, but {actual}")
        if group not in self._topologies:
            connect(self._topology_over(group, self.burst_config), self.burst_config)
        return self._topologies[group]

    def _topology_over(self, group: Any, burst: BurstConfig, levels: Any = None) -> Topology:
        """Return the cached ring over a group, with nodes from two hierarchical groups, or by hosts."""
        if group not in self._topologies:
            if levels and [len(levels), math.prod(level.size() for level in levels)] == [2, group.size()]:
                topology = Topology.from_groups(intra=levels[0], inter=levels[1])
            else:
                topology = Topology.single() if group is None else _nodes_by_host(group, burst.ring)
            self._topologies[group] = replace(topology, rates=self._rates)
        return self._topologies[group]

    def _refuse_other_mask(self, attention_mask: Tensor, mask: Mask, rows: int, topology: Topology) -> None:
        n = rows * topology.size
        if self.training:  # in generation Megatron always makes the mask of a prompt
            refuse_dense_mask(f"layer {self.layer_number}: attention_mask", n)
        if attention_mask.shape[-2:] != (rows, n):
            raise ValueError(
                f"layer {self.layer_number}: attention_mask must be [..., {rows}, {n}] (local queries "
                f"x all keys), got {tuple(attention_mask.shape)}"
            )
        queries = positions(n, rank=topology.rank, size=topology.size, layout=self.burst_config.layout)
        sees = mask.allows(queries, torch.arange(n)).to(attention_mask.device)
        if not bool((attention_mask == ~sees).all()):
            raise ValueError(
                f"layer {self.layer_number}: attention_mask is not {mask}: masks of documents "
                f"(--reset-attention-mask) and padding must come as packed sequences (PackedSeqParams)"
            )


def _batch_first(x: Tensor, is_packed: bool) -> Tensor:
    """Return [B, S, heads, dim] of [S, B, heads, dim], or of packed [T, heads, dim] or [T, 1, heads, dim]."""
    if is_packed and not (x.dim() == 3 or (x.dim() == 4 and x.shape[1] == 1)):
        raise ValueError(f"packed queries, keys and values must be [tokens, heads, dim], got {list(x.shape)}")
    return x[None] if is_packed and x.dim() == 3 else x.transpose(0, 1)


def _window(config: TransformerConfig, layer_number: int) -> Mask:
    """Return the layer's window, by Megatron's own rule."""
    size, skipping = getattr(config, "window_size", None), getattr(config, "window_attn_skip_freq", None)
    if size is None or not is_layer_window_attention(size, skipping, layer_number):
        return Mask.full()
    return Mask.window(*size)


def _sinks(config: TransformerConfig, pg_collection: Any) -> Tensor | None:
    """Return the sinks for config.softmax_type, [heads of this rank]; a Parameter if they are learnable.

    The Parameter is marked as sharded by tensor parallelism: clipping norms include all ranks' heads.
    """
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    heads = config.num_attention_heads // group.size()
    sinks = torch.zeros(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
    if kind == "off-by-one":
        return sinks
    sinks = torch.nn.Parameter(sinks)
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    if config.perform_initialization:
        config.init_method(sinks)
    return sinks


def _legal(kind: AttnMaskType, layer_number: int) -> AttnMaskType:
    if kind not in (*CAUSAL, *FULL):
        legal = "causal and no_mask, for packed sequences padding_causal and padding"
        raise ValueError(f"layer {layer_number}: burst attention takes mask types {legal}, got {kind}")
    return kind


def _group(config: TransformerConfig, pg_collection: Any) -> Any:
    """Return the model's context-parallel group, None if there is none."""
    group = getattr(pg_collection, "cp", None)
    if group is None:
        group = parallel_state.get_context_parallel_group(check_initialized=False)
    size, expected = group.size() if group is not None else 1, config.context_parallel_size
    if expected not in (1, size):
        raise ValueError(f"the model's context_parallel_size is {expected}, but its group has {size} ranks")
    return group


def _levels(config: TransformerConfig, group: Any, pg_collection: Any) -> Any:
    """Return Megatron's hierarchical groups of a context-parallel group; None without the setting."""
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if not sizes or group is None or group.size() == 1:
        return None
    levels = getattr(pg_collection, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups(
        check_initialized=False
    )
    if len(sizes) != 2 or not levels or [level.size() for level in levels] != list(sizes):
        actual = [level.size() for level in levels or ()]
        words = "burst attention takes two hierarchical groups, of a node and between nodes"
        raise ValueError(f"{words}; got sizes {list(sizes)} and groups of {actual}")
    return levels


def _nodes_by_host(group: Any, ring: str) -> Topology:
    try:
        return Topology.from_group(group)
    except ValueError as error:
        if ring == "flat":  # it needs no nodes
            return Topology.from_group(group, intra_size=group.size())
        raise ValueError(
            f"{error} (in Megatron: --hierarchical-context-parallel-sizes L M, or --burst-ring flat)"
        ) from error
