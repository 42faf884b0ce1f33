"""Our own kernel, in Triton: any pattern in one launch, D as an input, fp32 accumulators in place.

Full, causal and windowed tiles are walked by arithmetic, other patterns by lists of blocks (`blocks`). Empty
blocks take no time, full blocks need no mask. Forward starts from the running (out, lse) and writes the
merged pair, so the merge needs no pass of its own. Backward adds to running fp32 gradients. One launch
computes all gradients with one computation of scores: dq by atomic additions, in any order. Deterministic
calls take two launches, one for dk and dv, and one for dq; so do head dims with too few registers for one
launch. There one program computes each element in one order.

Works on CPU tensors where Triton interprets (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from burst_mcore import packages
from burst_mcore.attention.geometry.pattern import Abilities, Pattern
from burst_mcore.attention.kernels.blocks import LARGEST_BLOCK, BlockLists, blocks, diagonals, on_device
from burst_mcore.attention.kernels.kernel import BackwardInputs, InPlace, Kernel, Problem, Scores
from burst_mcore.dtypes import TRAINED, of_parts, wide

LARGEST_HEAD_DIM = 256


class Launch(NamedTuple):
    """The block sizes and compile options of a Triton kernel."""

    rows: int
    columns: int
    warps: int
    stages: int


def _launches(*sizes: tuple[int, int, int, int]) -> tuple[Launch, ...]:
    return tuple(Launch(*each) for each in sizes)


_ADA = {
    "forward": _launches((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 1)),
    "dq": _launches((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)),
    "all": _launches((64, 128, 8, 2)),
    "dkv": _launches((64, 128, 8, 2), (32, 64, 4, 2)),
    "dk": _launches((32, 64, 4, 2), (32, 64, 4, 1)),
    "dv": _launches((32, 128, 8, 2), (32, 64, 4, 1)),
}
_LAUNCHES: dict[tuple[int, int], dict[str, tuple[Launch, ...]]] = {
    (8, 0): {
        **_ADA,
        "all": _launches((64, 128, 8, 2), (32, 128, 8, 2)),
        "dk": _launches((32, 64, 4, 3), (32, 64, 4, 1)),
    },
    (8, 9): _ADA,
    (9, 0): {
        "forward": _launches((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 2)),
        "dq": _launches((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2)),
        "all": _launches((32, 128, 8, 2), (32, 128, 8, 2)),
        "dkv": _launches((64, 128, 8, 2), (32, 128, 8, 2)),
        "dk": _launches((32, 128, 8, 1), (32, 128, 8, 2)),
        "dv": _launches((64, 128, 8, 1), (64, 128, 8, 2)),
    },
    (10, 0): {
        "forward": _launches((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 1), (128, 64, 8, 1)),
        "dq": _launches((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1), (128, 64, 8, 1)),
        "all": _launches((64, 128, 8, 2), (64, 128, 8, 1)),
        "dkv": _launches((64, 128, 8, 2), (64, 128, 8, 1)),
        "dk": _launches((64, 128, 8, 1), (32, 128, 8, 2)),
        "dv": _launches((64, 128, 8, 1), (64, 128, 8, 1)),
    },
}
"""Launches by compute capability and kernel, for summed head dims of keys and values of 128, 256, 384, 512.

All gradients share one launch up to 256, where the device has registers and memory for it. dk and dv share a
launch up to 256, and have one launch each above. No inner loop spills a register
(`benchmarks/compiled.json`). In every product each warp has 16 rows or more, so no two warps compute the
same rows. No speed was measured."""
_OF_LISTS = {
    ((9, 0), "dk", 384): Launch(32, 128, 8, 2),  # with one stage an edge block takes 1.74 times a full block
    ((10, 0), "forward", 256): Launch(128, 64, 8, 3),  # with 128 columns edge blocks spill registers
}
"""Other launches for patterns with lists, by compute capability, kernel and summed head dims."""
_OF_FLOAT32 = _launches((32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1))
"""Launches of all kernels in float32, for head dims as in `_LAUNCHES`. Float32 has no matrix units, so a
thread makes 256 multiply-adds for a product of a block; with more, registers spill."""
_NEEDED: dict[tuple[int, int] | None, tuple[int, ...]] = {
    None: (40960, 53248, 67584, 67584),
    (8, 0): (82432, 131328, 102912, 98304),
    (8, 9): (82432, 74020, 90276, 98304),
    (9, 0): (81920, 147748, 164132, 196900),
    (10, 0): (115712, 164932, 147464, 213332),
}
"""The shared memory of launches in bytes, for head dims as in `_LAUNCHES`; None: float32 on any device."""


def like(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the nearest compute capability with entries in `_LAUNCHES`."""
    if capability[0] in (8, 12):  # all but 8.0 have 99 KiB of shared memory
        return (8, 0) if capability == (8, 0) else (8, 9)
    return (9, 0) if capability[0] == 9 else (10, 0)


def launch(
    name: str, dims: int, itemsize: int, capability: tuple[int, int] | None = None, lists: bool = False
) -> Launch:
    """Return the launch of a kernel.

    Args:
        name: "forward", "dq", "dkv", "dk", "dv", or "all" for dq, dk and dv at once.
        dims: the sum of the padded head dims of keys and values.
        itemsize: bytes of an element.
        capability: of the GPU; None for Hopper's.
        lists: whether the pattern has lists of blocks, since it is not a band.
    """
    if itemsize == 4:
        return _OF_FLOAT32[max(0, -(-dims // 128) - 1)]
    device = like(capability or (9, 0))
    smallest = 384 if name in ("dk", "dv") else 128
    place = max(0, -(-(dims - smallest) // 128))
    usual = _LAUNCHES[device][name][place]
    return _OF_LISTS.get((device, name, smallest + 128 * place), usual) if lists else usual


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
    return reason or _lacks_memory(problem) or packages.missing(_device_code())


def _lacks_memory(problem: Problem) -> str | None:
    """Return why a launch does not fit the shared memory of this GPU; None if all fit, or there is no GPU."""
    available = packages.shared_memory() if problem.device == "cuda" else None
    if available is None:
        return None
    dims = _power(problem.head_dim) + _power(problem.value_dim)
    need = needs(dims, problem.dtype.itemsize, packages.capability())
    if need <= available:
        return None
    return (
        f"head dims {problem.head_dim} (keys) and {problem.value_dim} (values) need {need} bytes of shared "
        f"memory a block, this GPU (compute capability {packages.capability()}) has {available}; "
        "smaller head dims need less"
    )


def needs(dims: int, itemsize: int, capability: tuple[int, int] | None) -> int:
    """Return the bytes of shared memory of a call's launches; arguments as in `launch`."""
    return _NEEDED[like(capability or (9, 0)) if itemsize < 4 else None][max(0, -(-dims // 128) - 1)]


def _forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    out = torch.empty((batch, rows, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=of_parts(q.dtype), device=q.device)
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
    """Merge a tile's results into out [B, M, H, Dv] and lse [B, H, M], in place; set both if `fresh`."""
    batch, rows, heads, dim = q.shape
    wide_dim, value_dim = _power(dim), _power(v.shape[-1])
    band = diagonals(pattern) is not None
    sizes = launch("forward", wide_dim + value_dim, q.itemsize, packages.capability(), not band)
    lists = _lists(pattern, sizes, q.device, by_columns=False)
    _device_code().forward[(-(-rows // sizes.rows) * batch * heads,)](
        q, k, v, None if band else _spoilt(v, _units(k, scores)), out, lse, *lists, scores.scale,
        scores.softcap or 0.0, rows, k.shape[1], heads, heads // k.shape[2], *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3],
        *out.stride()[:3], *lse.stride(), USED=dim, VALUE_USED=v.shape[-1], DIM=wide_dim,
        VALUE_DIM=value_dim, ROWS=sizes.rows, COLUMNS=sizes.columns, SOFTCAP=scores.softcap is not None,
        FRESH=fresh, BAND=band, PRECISION=_precision(q), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(y, memory_format=torch.contiguous_format) for y in (inputs.q, inputs.k, inputs.v)
    )
    if at_once(inputs, scores):
        total = torch.empty_like(dq, dtype=wide(dq.dtype))
        add_all(inputs, pattern, scores, total, dk, dv, fresh_dq=True, fresh_dkv=True)
        return total.to(dq.dtype), dk, dv
    add_dq(inputs, pattern, scores, dq, fresh=True)
    add_dkv(inputs, pattern, scores, dk, dv, fresh=True)
    return dq, dk, dv


def add_dq(inputs: BackwardInputs, pattern: Pattern, scores: Scores, dq: Tensor, *, fresh: bool) -> None:
    """Add a tile's dq to dq [B, M, H, D], in place; set it if `fresh`."""
    _gradients("dq", inputs, pattern, scores, (dq,), fresh)


def add_dkv(
    inputs: BackwardInputs, pattern: Pattern, scores: Scores, dk: Tensor, dv: Tensor, *, fresh: bool
) -> None:
    """Add a tile's dk and dv to dk [B, N, Hkv, D] and dv [B, N, Hkv, Dv], in place; set both if `fresh`.

    Both sums of a large head dim do not fit a GPU's registers: then each has its own launch.
    """
    dims = _power(inputs.q.shape[-1]) + _power(inputs.v.shape[-1])
    for name in of_keys(dims, inputs.q.itemsize):
        _gradients(name, inputs, pattern, scores, (dk, dv, dk), fresh)


def add_all(
    inputs: BackwardInputs,
    pattern: Pattern,
    scores: Scores,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    fresh_dq: bool,
    fresh_dkv: bool,
) -> None:
    """Add a tile's gradients to dq, dk and dv, in place, in one launch; fresh sums are set.

    dq is in at least float32: many programs add to each element.
    """
    if fresh_dq:
        dq.zero_()
    _gradients("all", inputs, pattern, scores, (dk, dv, dq), fresh_dkv)


def at_once(inputs: BackwardInputs, scores: Scores) -> bool:
    """Return whether one launch computes all gradients."""
    dims = _power(inputs.q.shape[-1]) + _power(inputs.v.shape[-1])
    capability, deterministic = packages.capability(), scores.deterministic
    softcap, itemsize = scores.softcap is not None, inputs.q.itemsize
    launches = of_gradients(dims, itemsize, capability, deterministic=deterministic, softcap=softcap)
    return launches == ("all",)


def of_gradients(
    dims: int,
    itemsize: int,
    capability: tuple[int, int] | None = None,
    *,
    deterministic: bool,
    softcap: bool = False,
) -> tuple[str, ...]:
    """Return the launches of backward: one for all gradients, if its inner loop spills no register.

    The other arguments are those of `launch`.
    """
    device = like(capability or (9, 0))
    largest = 128 if softcap and device == (8, 0) else 128 * len(_LAUNCHES[device]["all"])
    if not deterministic and dims <= largest:
        return ("all",)
    return ("dq", *of_keys(dims, itemsize))


def of_keys(dims: int, itemsize: int) -> tuple[str, ...]:
    """Return the launches that compute dk and dv; arguments as in `launch`."""
    return ("dk", "dv") if dims > 256 and itemsize < 4 else ("dkv",)


def _gradients(
    name: str, inputs: BackwardInputs, pattern: Pattern, scores: Scores, into: tuple[Tensor, ...], fresh: bool
) -> None:
    batch, rows, heads, dim = inputs.q.shape
    columns, kv_heads = inputs.k.shape[1:3]
    wide_dim, value_dim, code = _power(dim), _power(inputs.v.shape[-1]), _device_code()
    band = diagonals(pattern) is not None
    sizes = launch(name, wide_dim + value_dim, inputs.q.itemsize, packages.capability(), not band)
    flags = {"KEYS": name != "dv", "VALUES": name != "dk", "QUERIES": name == "all"} if name != "dq" else {}
    lists = _lists(pattern, sizes, inputs.q.device, by_columns=name != "dq")
    blocks = -(-rows // sizes.rows) * heads if name == "dq" else -(-columns // sizes.columns) * kv_heads
    units: tuple[Tensor | None, ...] = ()
    lse, delta = inputs.lse, inputs.delta
    if name == "dq":
        units = (None if band else _spoilt(inputs.k, _spoilt(inputs.v, _units(inputs.k, scores))),)
    elif not band:
        lse = _spoilt(inputs.q, _spoilt(inputs.dout, _statistics(inputs)))
        delta = delta.nan_to_num(0.0, 0.0, 0.0)  # the note of its row is in lse
    (code.dkv if flags else code.dq)[(blocks * batch,)](
        inputs.q, inputs.k, inputs.v, inputs.dout, *units, lse, delta, *into, *lists,
        scores.scale, scores.softcap or 0.0, rows, columns, heads, heads // kv_heads,
        *inputs.q.stride()[:3], *inputs.k.stride()[:3], *inputs.v.stride()[:3],
        *inputs.dout.stride()[:3], *lse.stride(), *delta.stride(),
        *(stride for total in into for stride in total.stride()[:3]), USED=dim,
        VALUE_USED=inputs.v.shape[-1], DIM=wide_dim, VALUE_DIM=value_dim,
        ROWS=sizes.rows, COLUMNS=sizes.columns, SOFTCAP=scores.softcap is not None, FRESH=fresh, BAND=band,
        PRECISION=_precision(inputs.q), num_warps=sizes.warps, num_stages=sizes.stages, **flags,
    )  # fmt: skip


def _units(k: Tensor, scores: Scores) -> Tensor:
    """Return the factor of scores to base 2 for each row of k, as notes for `_spoilt`."""
    unit = (scores.scale if scores.softcap is None else scores.softcap) * math.log2(math.e)
    batch, rows, heads, _ = k.shape
    return torch.full((batch, heads, _noted(rows)), unit, dtype=torch.float32, device=k.device)


def _statistics(inputs: BackwardInputs) -> Tensor:
    """Return the log-sum-exp of rows, NaN where lse or delta is NaN, as notes for `_spoilt`."""
    rows = inputs.lse.shape[-1]
    return pad(inputs.lse + 0.0 * inputs.delta, (0, _noted(rows) - rows))


def _noted(rows: int) -> int:
    """Return the length of notes of `rows`: whole blocks, so that kernels need no bounds check."""
    return -(-rows // LARGEST_BLOCK) * LARGEST_BLOCK


def _spoilt(x: Tensor, notes: Tensor) -> Tensor:
    """Set the notes [B, H, whole blocks] of non-finite rows of x [B, S, H, D] to NaN."""
    batch, rows, heads, dim = x.shape
    grid = (notes.shape[-1] // LARGEST_BLOCK * batch * heads,)
    _device_code().spoilt_rows[grid](x, notes, rows, heads, *x.stride()[:3], USED=dim, DIM=_power(dim))
    return notes


_Key = tuple[str, int, int, bool, torch.device]


def _lists(
    pattern: Pattern, sizes: Launch, device: torch.device, *, by_columns: bool
) -> tuple[Tensor | int | None, ...]:
    """Return the pattern as kernel arguments: the lists of its blocks, or the diagonals of a band."""
    band = diagonals(pattern)
    if band is not None:
        return (*(None,) * len(BlockLists._fields), *band)
    key = _key(sizes, device, by_columns=by_columns)
    if key not in pattern.kernel_cache:
        _make_lists([(pattern, key)])
    lists: BlockLists = pattern.kernel_cache[key]
    return (*lists, 0, 0)


def _key(sizes: Launch, device: torch.device, *, by_columns: bool) -> _Key:
    return "blocks", sizes.rows, sizes.columns, by_columns, device


def _make_lists(missing: Sequence[tuple[Pattern, _Key]]) -> None:
    tables = [blocks(pattern, rows, columns, by_columns=by) for pattern, (_, rows, columns, by, _) in missing]
    if tables:
        for (pattern, key), lists in zip(missing, on_device(tables, missing[0][1][-1]), strict=True):
            pattern.kernel_cache[key] = lists


def prepare(patterns: Iterable[Pattern], problem: Problem, device: torch.device, *, forward: bool) -> None:
    """Make the lists of all tiles of a pass, with one copy to the device."""
    dims = _power(problem.head_dim) + _power(problem.value_dim)
    itemsize, capability = problem.dtype.itemsize, packages.capability()
    backward = of_gradients(
        dims, itemsize, capability, deterministic=problem.deterministic, softcap=problem.softcap
    )
    names = ("forward",) if forward else backward
    missing: dict[tuple[int, _Key], tuple[Pattern, _Key]] = {}
    for pattern in patterns:
        for name in names if diagonals(pattern) is None else ():
            sizes = launch(name, dims, itemsize, capability, True)
            key = _key(sizes, device, by_columns=name not in ("forward", "dq"))
            if key not in pattern.kernel_cache:
                missing[id(pattern), key] = pattern, key
    _make_lists(list(missing.values()))


def _power(dim: int) -> int:
    """Return the power of two that a head dim is padded to; matrix units need at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


KERNEL = Kernel(
    "triton",
    _supports,
    _forward,
    _backward,
    takes_delta=True,
    abilities=Abilities(windows=True, pieces=True),
    in_place=InPlace(merge_forward, add_dq, add_dkv, at_once, add_all),
    prepare=prepare,
)
KERNELS = (KERNEL,)
