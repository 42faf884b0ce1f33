"""TransformerEngine's fused attention (cuDNN), 2.0 and later.

These are its low-level forward and backward; the forward's softmax statistics are inputs of the backward.
Written after the sources of 2.0 to 2.18.

Under masks with documents every tile is a call for packed sequences ("thd"). TransformerEngine rounds the
numbers of sequences and tokens up, so that few cuDNN plans cover all lengths. Other tiles are planned by
shape.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_mcore import packages
from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels import aten, reference
from burst_mcore.attention.kernels.aten import Sequences, half_on_cuda, is_causal, kept, sequences
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores
from burst_mcore.attention.kernels.wrappers import leaves_small_tiles, takes_any_value_dim

logger = logging.getLogger("burst_mcore")
_no_seed, _ends_of = partial(torch.zeros, dtype=torch.int64), partial(torch.arange, dtype=torch.int32)


def _te() -> Any:
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    return packages.loaded(module, "transformer_engine", "2.0", "3")


def _supports(problem: Problem) -> str | None:
    if problem.softcap:
        return "it has no softcap"
    reason = half_on_cuda(problem, largest_head_dim=128) or packages.not_on((8, 9, 10))
    return reason or packages.missing(_te())


def _supports_documents(problem: Problem) -> str | None:
    if problem.deterministic:
        return "windows within documents are left to 'aten-flash', which is not deterministic"
    reason = _supports(problem) or packages.not_on((9, 10))
    if reason is not None:
        return reason
    version = packages.loaded("transformer_engine.pytorch.utils", "transformer_engine").get_cudnn_version()
    if tuple(version) < (9, 7) or tuple(version)[:2] == (9, 10):
        return f"documents need cuDNN 9.7 or later, without the faults of 9.10; this is {version}"
    return None


class _Call(NamedTuple):
    """The arguments of a call that depend on the layout of its tensors."""

    layout: str
    """"bshd" or "thd", of all tensors."""
    mask: str
    ends: Sequences
    padded: dict[str, Tensor]
    """The offsets of sequences in memory, for packed calls."""


def _of_tile(pattern: Pattern, q: Tensor, k: Tensor) -> _Call:
    """Return a call for a batch of tiles."""
    ends = Sequences(_ends(q), _ends(k), q.shape[1], k.shape[1])
    return _Call("bshd", "causal" if pattern.causal else "no_mask", ends, {})


def _of_sequences(pattern: Pattern, q: Tensor, k: Tensor) -> _Call:
    """Return a call for packed sequences; the batches of a tile that is not packed are its sequences."""
    packed = pattern.packed
    ends = sequences(pattern, q) if packed else _of_tile(pattern, q, k).ends
    assert ends.of_q is not None and ends.of_k is not None
    lengths = (packed.q, packed.k) if packed else pattern.shape
    causal = "padding_causal" if lengths[0] == lengths[1] else "padding_causal_bottom_right"
    mask = causal if is_causal(pattern) else "padding"
    return _Call("thd", mask, ends, {"cu_seqlens_q_padded": ends.of_q, "cu_seqlens_kv_padded": ends.of_k})


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    q, k, v = (x.contiguous() for x in (q, k, v))  # the kernel reads by the layout's name, not by strides
    out, statistics, *max_logit = _attend(_of_tile(pattern, q, k), q, k, v, scores)
    return out, statistics.squeeze(-1), *max_logit


def _forward_of_documents(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    if _windowed(pattern):
        return aten.FLASH.forward(q, k, v, pattern, scores)
    (batch, rows), call = q.shape[:2], _of_sequences(pattern, q, k)
    q, k, v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    out, statistics = _attend(call, q, k, v, scores._replace(max_logit=False))  # of rows of padding, too
    lse = statistics[: batch * rows].view(batch, rows, -1)  # TransformerEngine rounds up the tokens
    return out.unflatten(0, (batch, rows)), lse.transpose(1, 2)


def _attend(call: _Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, ...]:
    """Return (out, statistics) in TransformerEngine's layout, and from 2.9 on the max logits.

    TransformerEngine rounds the max logits to the dtype of out.
    """
    te, ends = _te(), call.ends
    has_max_logit = scores.max_logit and packages.has(te.fused_attn_fwd, "return_max_logit")
    options = {"return_max_logit": True} if has_max_logit else {}
    out, aux, *max_logit = packages.call(
        te.fused_attn_fwd, True, ends.longest_q, ends.longest_k, ends.of_q, ends.of_k, q, k, v, q.dtype,
        te.FusedAttnBackend["F16_arbitrary_seqlen"], attn_scale=scores.scale, dropout=0.0,
        qkv_layout="_".join([call.layout] * 3), attn_bias_type="no_bias", attn_mask_type=call.mask,
        if_there={"o_format": call.layout}, **call.padded, **options,
    )  # fmt: skip
    return out, aux[0], *(x.to(aux[0].dtype) for x in max_logit if options)


def _backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    tensors = tuple(
        y.contiguous() for y in (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout) if y is not None
    )
    statistics = inputs.lse.unsqueeze(-1).contiguous()
    return _gradients(_of_tile(pattern, *tensors[:2]), tensors, statistics, scores)


def _backward_of_documents(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    if _windowed(pattern):
        return aten.FLASH.backward(inputs, pattern, scores)
    of_batch = (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout)
    tensors = tuple(y.flatten(0, 1).contiguous() for y in of_batch if y is not None)
    statistics = inputs.lse.transpose(1, 2).flatten(0, 1).unsqueeze(-1).contiguous()
    call = _of_sequences(pattern, inputs.q, inputs.k)
    dq, dk, dv = _gradients(call, tensors, statistics, scores)
    batch = len(inputs.q)
    return dq.unflatten(0, (batch, -1)), dk.unflatten(0, (batch, -1)), dv.unflatten(0, (batch, -1))


def _gradients(call: _Call, tensors: tuple[Tensor, ...], statistics: Tensor, scores: Scores) -> Gradients:
    """Return (dq, dk, dv) in TransformerEngine's layout; tensors: q, k, v, out, dout."""
    te, ends, dtype = _te(), call.ends, tensors[0].dtype
    no_seed = kept(_no_seed, 2, device=statistics.device)
    backend, run = te.FusedAttnBackend["F16_arbitrary_seqlen"], te.fused_attn_bwd
    layout = "_".join([call.layout] * 3)
    constants = packages.loaded("transformer_engine.pytorch.constants", "transformer_engine")
    dtypes = (constants.TE_DType[dtype],) if packages.has(run, "dqkv_dtype") else ()
    dq, dk, dv, *_ = packages.call(
        run, ends.longest_q, ends.longest_k, ends.of_q, ends.of_k, *tensors, dtype, *dtypes,
        [statistics, no_seed], backend, attn_scale=scores.scale, dropout=0.0, qkv_layout=layout,
        attn_bias_type="no_bias", attn_mask_type=call.mask, deterministic=scores.deterministic,
        if_there={"o_format": call.layout, "do_format": call.layout, "dqkv_layout": layout}, **call.padded,
    )  # fmt: skip
    return dq, dk, dv


def _ends(x: Tensor) -> Tensor:
    """Return cu_seqlens of a batch of full sequences."""
    batch, rows = x.shape[:2]
    return kept(_ends_of, 0, (batch + 1) * rows, rows, device=x.device)


def _windowed(pattern: Pattern) -> bool:
    """Return whether a tile has a window, which this kernel leaves to aten-flash; the first is logged."""
    packed = pattern.packed
    windowed = pattern.windowed if packed is None else packed.left >= 0 or packed.right > 0
    if windowed:
        _tell_of_windows()
    return windowed


@lru_cache
def _tell_of_windows() -> None:
    logger.info("kernel te: windows within documents are left to aten-flash")


OF_DOCUMENTS = takes_any_value_dim(
    Kernel(
        "te",
        _supports_documents,
        _forward_of_documents,
        _backward_of_documents,
        abilities=Abilities(packed=True),
    )
)
_LARGE_TILES = Kernel("te", _supports, _forward, _backward, of_documents=OF_DOCUMENTS, copies=True)
KERNEL = takes_any_value_dim(
    leaves_small_tiles(_LARGE_TILES, lambda scores: reference.KERNEL if scores.deterministic else aten.FLASH)
)
KERNELS = (KERNEL,)
