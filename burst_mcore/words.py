"""Helpers for errors: values in one line, aliases of arguments in other packages; and digests of contents."""

from __future__ import annotations

import ctypes
import difflib
import hashlib
import math
import numbers
from collections.abc import Iterable, Mapping

from torch import Tensor

LONGEST = 80
"""The maximum characters of a value in an error."""

_MASKS = "mask=Mask.causal(), Mask.window(left, right), Mask.blocks(...), ... joined by & and |"
_WRITTEN = {
    "mask=Mask.causal()": ("causal", "is_causal"),
    "mask=Mask.causal() & Mask.window(left, 0)": ("window_size", "window", "sliding_window"),
    _MASKS: ("attn_mask", "attention_mask", "block_mask", "attn_mask_type", "key_padding_mask"),
    "mask=Mask.causal() & Mask.documents(cu_seqlens), over the whole sequence": (
        *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "packed_seq_params"),
        *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"),
    ),
    "softmax_scale=...": ("scale", "sm_scale", "scaling"),
    "softcap=...": ("logits_soft_cap", "softcap_value", "attn_logit_softcapping"),
    "sinks=...": ("s_aux", "sink", "learnable_sink", "softmax_offset"),
    "return_max_logit=True": ("return_max_logits",),
    "return_lse=True": ("return_attn_probs", "return_softmax_lse", "return_softmax"),
    "topology=Topology.from_group(group)": ("group", "process_group", "cp_group", "sequence_process_group"),
}
_ANSWERS = {name: f"write burst_attention(..., {ours})" for ours, names in _WRITTEN.items() for name in names}
_ANSWERS |= dict.fromkeys(("dropout", "dropout_p"), "scores are never dropped out; leave it out")
_ANSWERS |= dict.fromkeys(
    ("alibi_slopes", "attn_bias", "bias", "score_mod"),
    "biases of scores are not supported; turn q and k by a rotary embedding, or write mask=Mask...",
)
REMOVED = {
    "mesh": "it is removed; write ring='direct' or head_parallel='auto', which also move fewer bytes",
    "sm_margin": "it is removed; write max_ctas=..., the multiprocessors that messages may take",
}
"""Replacements of removed settings."""
_ANSWERS |= REMOVED
_ANSWERS["enable_gqa"] = "leave it out; k and v may have fewer heads than q"


def brief(value: object) -> str:
    """Return a value in one short line: a tensor by its shape, others by the beginning of their repr."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def is_finite(value: object) -> bool:
    """Return whether a value is a number, of Python or numpy, within the range of floats."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def no_argument(owner: str, names: Iterable[str], legal: Iterable[str], ours: Mapping[str, str]) -> TypeError:
    """Return the error of arguments that `owner` does not have.

    ours: by the name of an argument, the replacement in a call of burst_attention.
    """
    answers = _ANSWERS | {name: f"write burst_attention(..., {x})" for name, x in ours.items()}
    problems = [f"{name}: {answers.get(name) or _nearest(name, legal)}" for name in names]
    return TypeError(f"{owner} has no argument {'; '.join(problems)}")


def _nearest(name: str, legal: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, legal, n=1)
    return f"did you mean {near[0]}?" if near else f"legal are {', '.join(legal)}"


def digest(content: str | Tensor) -> str:
    """Return 16 hexadecimal digits of a text, or of a CPU tensor's values and shape."""
    if isinstance(content, str):
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    x = content.contiguous()
    values = ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""
    return hashlib.blake2b(values + str(tuple(x.shape)).encode(), digest_size=8).hexdigest()
