"""Our own kernel, in Triton: any pattern in one launch, D given, fp32 accumulators read and written in place.

A tile's pattern is walked as lists of blocks (`blocks`): empty ones cost nothing, full ones need no mask.
Forward starts from the running (out, lse) and leaves the merged ones, so merging costs no pass of its own.
Backward adds to running fp32 gradients. dk and dv come from one kernel, dq from another. Each element comes
from one program in one order, so gradients are deterministic.

Works on CPU tensors where Triton interprets (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_mcore import packages
from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels.blocks import Blocks, blocks
from burst_mcore.attention.kernels.kernel import BackwardInputs, InPlace, Kernel, Problem, Scores
from burst_mcore.dtypes import TRAINED, wide

LARGEST_HEAD_DIM = 256


class Launch(NamedTuple):
    """The block sizes of a Triton kernel, and the options that it is compiled with."""

    rows: int
    columns: int
    warps: int
    stages: int


def launch(name: str, dim: int, itemsize: int) -> Launch:
    """Return the sizes for a kernel ("forward", "dkv", "dq"), a head dim and the bytes of an element.

    dim is a power of two. The sizes compile for Hopper with few or no registers spilled; no speed was
    measured.
    """
    if itemsize == 4:
        return Launch(32, 32, 8, 1)
    if dim > 128:
        return Launch(64, 32, 8, 2)
    if name == "forward":
        return Launch(128, 128 if dim <= 64 else 64, 8, 3)
    return Launch(64 if name == "dkv" and dim > 64 else 128, 64, 8, 2)


def _device_code() -> Any:
    return packages.loaded("burst_mcore.attention.kernels.triton_code", "triton", "3.6")


def interpreted() -> bool:
    """Return whether Triton runs in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _supports(problem: Problem) -> str | None:
    if problem.device != "cuda" and not (problem.device == "cpu" and interpreted()):
        return f"tensors are on {problem.device}, not on cuda"
    if problem.dtype not in TRAINED.values():
        return f"dtype {problem.dtype}, it takes float16, bfloat16 and float32"
    dim = max(problem.head_dim, problem.value_dim)
    if dim > LARGEST_HEAD_DIM:
        return f"head dim {dim}, it takes up to {LARGEST_HEAD_DIM}"
    reason = packages.not_on((8, 9, 10, 11, 12)) if problem.device == "cuda" else None
    if reason is not None:
        return reason
    code = _device_code()
    return code if isinstance(code, str) else None


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    out = torch.empty((batch, rows, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=wide(q.dtype), device=q.device)
    merge_forward(q, k, v, pattern, scores, out, lse, fresh=True)
    return out, lse


def merge_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    scores: Scores,
    out: Tensor,
    lse: Tensor,
    *,
    fresh: bool,
) -> None:
    """Merge a tile's share into out [B, M, H, Dv] and lse [B, H, M], in place; set them if `fresh`."""
    batch, rows, heads, dim = q.shape
    wide_dim, value_dim = _power(dim), _power(v.shape[-1])
    sizes = launch("forward", max(wide_dim, value_dim), q.itemsize)
    lists = _lists(pattern, sizes, q.device, by_columns=False)
    grid = (-(-rows // sizes.rows), batch * heads)
    _device_code().forward[grid](
        q, k, v, out, lse, *lists, scores.scale, scores.softcap or 0.0, rows, k.shape[1], heads,
        heads // k.shape[2], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        *lse.stride(), USED=dim, VALUE_USED=v.shape[-1], DIM=wide_dim, VALUE_DIM=value_dim, ROWS=sizes.rows,
        COLUMNS=sizes.columns, SOFTCAP=scores.softcap is not None, FRESH=fresh, PRECISION=_precision(q),
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(y, memory_format=torch.contiguous_format) for y in (inputs.q, inputs.k, inputs.v)
    )
    add_dq(inputs, pattern, scores, dq, fresh=True)
    add_dkv(inputs, pattern, scores, dk, dv, fresh=True)
    return dq, dk, dv


def add_dq(inputs: BackwardInputs, pattern: Pattern, scores: Scores, dq: Tensor, *, fresh: bool) -> None:
    """Add a tile's share to dq [B, M, H, D], in place; set it if `fresh`."""
    _gradients("dq", inputs, pattern, scores, (dq, dq), fresh)


def add_dkv(
    inputs: BackwardInputs, pattern: Pattern, scores: Scores, dk: Tensor, dv: Tensor, *, fresh: bool
) -> None:
    """Add a tile's share to dk [B, N, Hkv, D] and dv [B, N, Hkv, Dv], in place; set them if `fresh`."""
    _gradients("dkv", inputs, pattern, scores, (dk, dv), fresh)


def _gradients(
    name: str,
    inputs: BackwardInputs,
    pattern: Pattern,
    scores: Scores,
    into: tuple[Tensor, Tensor],
    fresh: bool,
) -> None:
    batch, rows, heads, dim = inputs.q.shape
    columns, kv_heads = inputs.k.shape[1:3]
    wide_dim, value_dim = _power(dim), _power(inputs.v.shape[-1])
    sizes = launch(name, max(wide_dim, value_dim), inputs.q.itemsize)
    lists = _lists(pattern, sizes, inputs.q.device, by_columns=name == "dkv")
    of_columns = -(-columns // sizes.columns), batch * kv_heads
    grid = of_columns if name == "dkv" else (-(-rows // sizes.rows), batch * heads)
    getattr(_device_code(), name)[grid](
        inputs.q, inputs.k, inputs.v, inputs.dout, inputs.lse, inputs.delta, *into, *lists,
        scores.scale, scores.softcap or 0.0, rows, columns, heads, heads // kv_heads,
        *inputs.q.stride()[:3], *inputs.k.stride()[:3], *inputs.v.stride()[:3],
        *inputs.dout.stride()[:3], *inputs.lse.stride(), *inputs.delta.stride(), *into[0].stride()[:3],
        *into[1].stride()[:3], USED=dim, VALUE_USED=inputs.v.shape[-1], DIM=wide_dim, VALUE_DIM=value_dim,
        ROWS=sizes.rows, COLUMNS=sizes.columns, SOFTCAP=scores.softcap is not None, FRESH=fresh,
        PRECISION=_precision(inputs.q), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _lists(pattern: Pattern, sizes: Launch, device: torch.device, *, by_columns: bool) -> Blocks:
    key = "blocks", sizes.rows, sizes.columns, by_columns, device
    if key not in pattern.kernel_cache:
        lists_on_cpu = blocks(pattern, sizes.rows, sizes.columns, by_columns=by_columns)
        pattern.kernel_cache[key] = lists_on_cpu.to(device)
    lists: Blocks = pattern.kernel_cache[key]
    return lists


def _power(dim: int) -> int:
    """Return the power of two that a head dim is padded to; matrix units want 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


def _precision(x: Tensor) -> str:
    """Return the precision of products: exact for float32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


KERNEL = Kernel(
    "triton",
    _supports,
    _forward,
    _backward,
    takes_delta=True,
    abilities=Abilities(windows=True, pieces=True),
    in_place=InPlace(merge_forward, add_dq, add_dkv),
)
