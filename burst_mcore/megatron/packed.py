"""Packed sequences: Megatron's PackedSeqParams of a call as a mask and a layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.megatron.layouts import ZIGZAG, layout_of_packed, made_once
from burst_mcore.words import brief
from burst_mcore.wrap import around, wrap

CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass(frozen=True)
class Packing:
    """The documents of one packed batch."""

    documents: Mask
    """A token sees the tokens of its own document; tokens of padding are documents of their own."""
    layout: Layout
    """The sharding over context-parallel ranks."""


def packing(params: Any, tokens: int, size: int, layout: Layout | str = ZIGZAG) -> Packing | None:
    """Return the documents of a packed batch of `tokens` tokens over `size` context-parallel ranks.

    None unless params are of packed tokens (thd). layout: of sequences.

    The tensors are read once for each batch, not for each layer: reading a CUDA tensor synchronizes. Tokens
    after the last document are padding.

    Args:
        params: Megatron's PackedSeqParams. Documents have the lengths of `cu_seqlens_q`, and the starts of
            `cu_seqlens_q_padded`, if given.

    Raises:
        ValueError: cu_seqlens that are not legal, or differ between queries and keys, or do not fit the
            number of tokens or ranks; another format or sharding.
    """
    if not _is_packed(params):
        return None
    mode = getattr(params, "cp_partition_mode", None) or "zigzag"
    if size > 1 and layout != ZIGZAG and layout_of_packed() is None:
        advice = "use zigzag, as Megatron shards their documents"
        raise ValueError(f"layout {layout} does not go with packed sequences: {advice}")
    if size > 1 and mode != "zigzag":
        raise ValueError(f"packed_seq_params have cp_partition_mode {mode!r}: burst attention takes zigzag")
    tensors = [getattr(params, name, None) for name in CU_SEQLENS]
    for name, x in zip(CU_SEQLENS, tensors, strict=True):
        if not (isinstance(x, Tensor) or (x is None and name != CU_SEQLENS[0])):
            raise ValueError(f"{name} of packed sequences must be a tensor of integers, got {x!r}")
    place = tokens, size, layout_of_packed()
    return made_once(_PACKINGS, tensors, place, lambda: _packing(tensors, tokens, size))


def _is_packed(params: Any) -> bool:
    """Return whether q, k and v are [tokens, heads, dim] of documents; ValueError for contradictions."""
    ends = params.cu_seqlens_q
    if params.qkv_format not in ("thd", "sbhd"):
        raise ValueError(f"qkv_format must be 'thd', or 'sbhd' for one sequence, got {params.qkv_format!r}")
    if params.qkv_format == "sbhd" and ends is not None and ends.numel() > 2:
        raise ValueError(f"packed documents need format thd, got 'sbhd' with {ends.numel() - 1} documents")
    return bool(params.qkv_format == "thd")


def roll_within_slots() -> None:
    """Patch Megatron's multi-token prediction to shift packed tokens within their padded slots.

    Megatron-Core 0.16 to 0.20 shift by `cu_seqlens_q`, though rows lie by `cu_seqlens_q_padded`, and use the
    model's context-parallel group instead of the call's.
    """
    from megatron.core.transformer import multi_token_prediction

    wrap(multi_token_prediction, "_roll_tensor_packed_seq", _rolled)


@around
def _rolled(
    roll: Callable, x: Tensor, shifts: int, dims: int, params: Any, cp_group: Any, **kwargs: Any
) -> Any:
    shifted_params = copy.copy(params)
    if (slots := getattr(shifted_params, CU_SEQLENS[2], None)) is not None:
        shifted_params.cu_seqlens_q = slots
    if cp_group is not None and getattr(shifted_params, "local_cp_size", None) is not None:
        cp_group = shifted_params.cp_group  # None: this rank alone
    return roll(x, shifts, dims, shifted_params, cp_group, **kwargs)


_PACKINGS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _packing(boundaries: Sequence[Tensor | None], tokens: int, size: int) -> Packing:
    lengths_of, keys, slots_of, slots_of_keys = boundaries
    assert lengths_of is not None
    real = _ends(CU_SEQLENS[0], lengths_of)
    slots = real if slots_of is None else _ends(CU_SEQLENS[2], slots_of)
    _refuse_other_keys(CU_SEQLENS[1], keys, lengths_of, real)
    _refuse_other_keys(CU_SEQLENS[3], slots_of_keys, slots_of, slots)
    real, slots = _same_length(real, slots)
    if int(slots[-1]) > tokens:
        raise ValueError(f"documents end at {int(slots[-1])} (cu_seqlens), but ranks hold {tokens} tokens")
    too_long = (real.diff() > slots.diff()).nonzero().flatten().tolist()
    if too_long:
        document = too_long[0]
        raise ValueError(
            f"document {document} has {int(real.diff()[document])} tokens by cu_seqlens_q, but room for "
            f"{int(slots.diff()[document])} by cu_seqlens_q_padded"
        )
    slots = torch.cat([slots, slots.new_tensor([tokens])])
    ends_of_real = slots[:-2] + real.diff()
    documents = Mask.documents(torch.cat([slots, ends_of_real]).unique())
    return Packing(documents, _layout(slots.unique(), size))


def _layout(ends: Tensor, size: int) -> Layout:
    if size == 1:
        return ZIGZAG
    if (layout := layout_of_packed()) is not None:
        return layout
    illegal = (ends % (2 * size)).nonzero().flatten().tolist()
    if illegal:
        raise ValueError(
            f"over {size} ranks Megatron shards each document in {2 * size} chunks: pad documents to "
            f"multiples of {2 * size} tokens (cu_seqlens_q_padded), but one ends at {int(ends[illegal[0]])}"
        )
    return Layout("zigzag-documents", ends=tuple(ends.tolist()))


def _ends(name: str, x: Tensor) -> Tensor:
    """Check cu_seqlens; return them on the CPU, int64 [documents + 1]."""
    ends = x.detach().cpu()
    if ends.dim() != 1 or len(ends) < 2 or ends.is_floating_point() or ends.dtype == torch.bool:
        raise ValueError(f"{name} must be integers [documents + 1], got {ends.dtype} {list(ends.shape)}")
    ends = ends.to(torch.int64)
    if int(ends[0]) != 0 or bool((ends.diff() < 0).any()) or int(ends[-1]) == 0:
        raise ValueError(f"{name} must ascend from 0 and hold at least one token, got {brief(ends.tolist())}")
    return ends


def _refuse_other_keys(name: str, keys: Tensor | None, queries: Tensor | None, ends: Tensor) -> None:
    """Raise ValueError unless the cu_seqlens of keys equal `ends`, the cu_seqlens of queries."""
    if keys is None or keys is queries:
        return
    of_keys = _ends(name, keys)
    if not torch.equal(of_keys, ends):
        raise ValueError(
            f"burst attention takes packed queries and keys of the same documents, but {name} is "
            f"{brief(of_keys.tolist())} and that of the queries {brief(ends.tolist())}"
        )


def _same_length(real: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return both without the empty documents at the end of the longer."""
    n = min(len(real), len(slots))
    if bool((real[n - 1 :] != real[n - 1]).any()) or bool((slots[n - 1 :] != slots[n - 1]).any()):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_q_padded must be of one length, got {len(real)} and {len(slots)}"
        )
    return real[:n], slots[:n]
