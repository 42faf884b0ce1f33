"""The flash kernels that torch ships for CUDA: cuDNN and FlashAttention-2; and flash kernels' conventions.

Their backwards read out only to form delta. The conventions: windows, and packed sequences (varlen) by
cu_seqlens. For a packed pattern, tensors of a tile [B, S, H, D] become [B * S, H, D], and lse and delta
[B, H, S] become [H, B * S]: sequence after sequence, batch after batch (`takes_flat`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels.cpu import heads_first
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Problem, Results, Scores
from burst_mcore.attention.kernels.wrappers import leaves_small_tiles, takes_any_value_dim

_aten = torch.ops.aten
_no_seed = partial(torch.zeros, dtype=torch.int64)  # dropout seed and offset of a call without dropout
HALF = (torch.float16, torch.bfloat16)


class Sequences(NamedTuple):
    """cu_seqlens of packed queries and keys, int32 [sequences + 1], and the maximum lengths."""

    of_q: Tensor | None
    of_k: Tensor | None
    longest_q: int
    longest_k: int


def sequences(pattern: Pattern, q: Tensor) -> Sequences:
    """Return the sequences of a packed pattern, for the batches of q [B * S, H, D]; cached on the pattern.

    Of another pattern, the lengths alone.
    """
    if pattern.packed is None:
        return Sequences(None, None, *pattern.shape)
    batch = len(q) // pattern.shape[0]
    key = "sequences", batch, q.device
    entry: tuple[Sequences, Tensor] | None = pattern.kernel_cache.get(key)
    if entry is None:
        lengths = pattern.packed.q, pattern.packed.k
        ends = torch.tensor([[*accumulate(x * batch, initial=0)] for x in lengths], dtype=torch.int32)
        if q.is_cuda:  # one asynchronous copy; its source lives as long as the pattern
            ends = ends.pin_memory()
        entry = Sequences(*ends.to(q.device, non_blocking=True), *map(max, lengths)), ends
        if active_fake_mode() is None:  # never cache a fake mode's tensor
            pattern.kernel_cache[key] = entry
    return entry[0]


def kept(make: Callable[..., Tensor], *arguments: Any, device: torch.device) -> Tensor:
    """Return make(*arguments, device=device), cached by stream; read-only."""
    if active_fake_mode() is not None:
        return make(*arguments, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(make, arguments, device, stream)


@lru_cache(maxsize=256)
def _kept(make: Callable[..., Tensor], arguments: Any, device: torch.device, stream: int) -> Tensor:
    return make(*arguments, device=device)


def keywords(pattern: Pattern, q: Tensor) -> dict[str, Any]:
    """Return the cu_seqlens arguments of flash-attn packages."""
    if pattern.packed is None:
        return {}
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, sequences(pattern, q), strict=True))


def is_causal(pattern: Pattern) -> bool:
    """Return whether the tile, or each of its sequences, is causal from the lower right corner."""
    return pattern.packed.causal if pattern.packed else pattern.causal


def takes_flat(kernel: Kernel) -> Kernel:
    """Return `kernel`, which takes tensors of a packed pattern flat; its backward gets a contiguous lse."""

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1).contiguous()

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
        if pattern.packed is None:
            return kernel.forward(q, k, v, pattern, scores)
        out, lse = kernel.forward(flat(q), flat(k), flat(v), pattern, scores)
        return out.unflatten(0, (len(q), -1)), lse.unflatten(1, (len(q), -1)).transpose(0, 1)

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
        if pattern.packed is None:
            return kernel.backward(inputs._replace(lse=inputs.lse.contiguous()), pattern, scores)
        dout, q, k, v = map(flat, (inputs.dout, inputs.q, inputs.k, inputs.v))
        out = None if inputs.out is None else flat(inputs.out)
        lse, delta = (x.transpose(0, 1).flatten(1).contiguous() for x in (inputs.lse, inputs.delta))
        gradients = kernel.backward(BackwardInputs(dout, q, k, v, out, lse, delta), pattern, scores)
        dq, dk, dv = (x.unflatten(0, (len(inputs.q), -1)) for x in gradients)
        return dq, dk, dv

    return replace(kernel, forward=forward, backward=backward)


def from_lower_right(pattern: Pattern) -> tuple[int, int]:
    """Return (left, right), -1 for unbounded, counted from the diagonal into the lower right corner.

    FlashAttention's convention: row m sees column n iff -left <= n - (m + N - M) <= right. Every row and
    column of a tile's window has a pair. So neither bound is negative; flash-attn reads a negative bound as
    unbounded. A window has no more rows than columns: FlashAttention-2 takes a right bound of N and more as
    unbounded, and an unbounded bound as N.
    """
    if pattern.packed:
        return pattern.packed.left, pattern.packed.right
    if pattern.full or pattern.causal:
        return -1, -1
    rows, columns = pattern.shape
    assert rows <= columns, f"a window over {pattern.shape}"
    surplus = columns - rows
    left = -1 if pattern.low is None else surplus - pattern.low
    right = -1 if pattern.high is None else pattern.high - surplus
    assert left >= 0 or pattern.low is None, f"a window from {pattern.low} on over {pattern.shape}"
    assert right >= 0 or pattern.high is None, f"a window up to {pattern.high} over {pattern.shape}"
    return left, right


def half_on_cuda(problem: Problem, largest_head_dim: int) -> str | None:
    """Return why a kernel for float16 and bfloat16 on CUDA does not support a problem; None if it does."""
    if problem.device != "cuda":
        return f"tensors are on {problem.device}, not on cuda"
    if problem.dtype not in HALF:
        return f"dtype {problem.dtype}, it takes float16 and bfloat16"
    dim = max(problem.head_dim, problem.value_dim)
    if problem.head_dim % 8 or problem.value_dim % 8 or dim > largest_head_dim:
        return f"head dim {dim}, it takes multiples of 8 up to {largest_head_dim}"
    return None


def _flash_supports(problem: Problem) -> str | None:
    if problem.softcap:
        return "torch gives no way to its softcap"
    if problem.deterministic:
        return "it is deterministic only under a switch of torch's, which may be another in backward"
    return half_on_cuda(problem, largest_head_dim=256)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    left, right = from_lower_right(pattern)
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, *sequences(pattern, q), 0.0, is_causal(pattern), False,
        scale=scores.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse


def _flash_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    left, right = from_lower_right(pattern)
    dout, q, k, v, out, lse, _ = inputs
    seed = kept(_no_seed, (), device=q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        dout, q, k, v, out, lse, *sequences(pattern, q), 0.0, is_causal(pattern), seed, seed,
        scale=scores.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_supports(problem: Problem) -> str | None:
    if problem.softcap:
        return "torch gives no way to a softcap"
    if problem.deterministic:
        return "its gradients are not known to be deterministic"
    if problem.documents:
        return (
            "documents give its tiles new shapes in every call, and it plans a shape for up to 0.2 s: choose "
            "'aten-flash', 'flash2', 'flash3', 'flash4' or 'triton'"
        )
    return half_on_cuda(problem, largest_head_dim=128)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *heads_first(q, k, v), None, True, 0.0, pattern.causal, scale=scores.scale
    )
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def _cudnn_backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
    dout, q, k, v, out, lse, _ = inputs
    assert out is not None
    # torch caches cuDNN's plan by sizes, without the strides of dout and out: so both are contiguous.
    dout, q, k, v, out = heads_first(dout.contiguous(), q, k, v, out.contiguous())
    seed = kept(_no_seed, (), device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, q.shape[2],
        k.shape[2], 0.0, pattern.causal, scale=scores.scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


CUDNN = Kernel("cudnn", _cudnn_supports, _cudnn_forward, _cudnn_backward)
ABILITIES = Abilities(windows=True, packed=True)
FLASH = takes_flat(
    Kernel("aten-flash", _flash_supports, _flash_forward, _flash_backward, abilities=ABILITIES)
)
KERNELS = tuple(map(takes_any_value_dim, (leaves_small_tiles(CUDNN, FLASH), FLASH)))
