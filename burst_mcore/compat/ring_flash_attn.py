"""A replacement for ring-flash-attention's adapter of transformers' flash attention.

Stacks that call `substitute_hf_flash_attn` once and `update_ring_flash_attn_params` before each forward
(OpenRLHF, prime-rl, axolotl, slime's FSDP) import them from here. The contract is the same: one packed row,
sharded in equal contiguous parts, cu_seqlens of the whole row, and the caller reduces losses and gradients.
https://github.com/zhuzilin/ring-flash-attention, ring_flash_attn/adapters/hf_adapter.py, at 123f924.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.mask import Mask
from burst_mcore.words import brief

CONTIGUOUS = BurstConfig(layout="contiguous", head_parallel="auto")
"""The callers' layout; with head parallelism where it is faster, since contiguous parts are not balanced."""


class _State:
    """The ring of this process, and the documents of the current forward."""

    topology: Topology | None = None
    ends: tuple[int, ...] = ()
    on = True


_originals: dict[str, Any] = {}
"""Transformers' attention functions by name."""


def substitute_hf_flash_attn(process_group: dist.ProcessGroup, heads_k_stride: int = 1) -> None:
    """Replace every flash attention of transformers by BurstAttention. Collective over the group.

    Args:
        process_group: the ranks that share a sequence.
        heads_k_stride: unused: keys and values rotate with all their heads.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size = dist.get_world_size(process_group)
    _State.topology = Topology.from_group(process_group) if size > 1 else Topology.single()
    for name in [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("flash_attention_")]:
        _originals.setdefault(name, ALL_ATTENTION_FUNCTIONS[name])
        ALL_ATTENTION_FUNCTIONS.register(name, _attend)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: dist.ProcessGroup) -> None:
    """Set the documents of the whole row in the next forwards.

    Args:
        cu_seqlens: ends of the documents, from 0 to the number of tokens. Tokens after the last end, up to
            the next multiple of the ranks, are padding: axolotl pads a row after this call.

    Raises:
        ValueError: cu_seqlens do not ascend from 0.
    """
    ends = [int(end) for end in cu_seqlens.flatten().tolist()]
    if not ends or ends[0] != 0 or ends != sorted(ends) or ends[-1] == 0:
        raise ValueError(f"cu_seqlens must ascend from 0 to the number of tokens, got {brief(ends)}")
    tokens = ends[-1] + -ends[-1] % dist.get_world_size(process_group)
    _State.ends = tuple(dict.fromkeys([*ends, tokens]))


def use_ring_attn(flag: bool) -> None:
    """Turn the ring on, or off: transformers' flash attention for whole rows on each rank."""
    _State.on = flag


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """Implement transformers' attention interface, causal within the documents; attention_mask is ignored.

    A sliding window counts tokens as without a ring, with the query's own.
    """
    if not _State.on:
        original = _originals[module.config._attn_implementation]
        return original(module, query, key, value, attention_mask, **options)
    assert _State.topology is not None
    ends, size = _State.ends, _State.topology.size
    if not ends or ends[-1] != query.shape[2] * size or len(query) != 1:
        raise ValueError(
            f"{type(module).__name__} got {len(query)} rows of {query.shape[2]} tokens on each of {size} "
            f"ranks: pack documents into one row, and call update_ring_flash_attn_params first, with "
            f"cu_seqlens to {query.shape[2] * size}; they went to {ends[-1:] or 'nothing'}"
        )
    if dropout := options.get("dropout"):
        raise ValueError(f"attention dropout {dropout} is not supported: set attention_dropout to 0")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"{type(module).__name__} asks for attention that is not causal: not supported")
    mask, window = Mask.causal(), options.get("sliding_window")
    if window is not None and window < ends[-1]:
        mask = Mask.window(window - 1, 0)
    if len(ends) > 2:
        mask = mask & Mask.documents(ends)
    out = burst_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        topology=_State.topology,
        mask=mask,
        config=CONTIGUOUS,
        softmax_scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return out, None
