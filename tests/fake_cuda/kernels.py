"""Kernels of the adapters as stand-ins: the arguments of the real ones, reference arithmetic, one launch."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from released import NEWEST
from released import backward as _backward
from released import fill as _fill
from released import forward as _attend
from released import of_out as _of_out
from released import packed_backward as _packed_backward
from released import packed_forward as _packed_forward
from released import pattern_of as _pattern
from torch import Tensor

from burst_mcore import packages
from burst_mcore.attention import api
from burst_mcore.attention.kernels import table, wrappers
from burst_mcore.attention.kernels import triton as own
from burst_mcore.attention.kernels.kernel import BackwardInputs, InPlace
from burst_mcore.attention.kernels.reference import KERNEL as REFERENCE
from burst_mcore.attention.numerics import rowwise
from burst_mcore.dtypes import of_parts, wide
from burst_mcore.loss import rows_triton

from .tensors import STAND_INS, CudaTensor, as_kernel, launch, on_host, values_of


def _cudnn(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale):
    out, lse = _attend(*(x.transpose(1, 2) for x in (q, k, v)), scale, None, _tile(q, k, causal))
    return (
        out.transpose(1, 2),
        lse.float().unsqueeze(-1),
        None,
        None,
        q.shape[2],
        k.shape[2],
        None,
        None,
        None,
    )


def _tile(q, k, causal):
    """Of [B, H, S, D]."""
    return _pattern(q.transpose(1, 2), k.transpose(1, 2), causal, -1, -1, -1)


def _cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, ends_q, ends_k, most_q, most_k, dropout=0.0, causal=False,
    *, scale,
):  # fmt: skip
    dout, q_, k_, v_, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    x = _of_out(dout, q_, k_, v_, out, lse.squeeze(-1))
    return tuple(g.transpose(1, 2).contiguous() for g in _backward(x, scale, None, _tile(q, k, causal)))


def _flash(
    q, k, v, ends_q, ends_k, most_q, most_k, dropout, causal, debug=False, *, scale, window_size_left,
    window_size_right,
):  # fmt: skip
    window = window_size_left, window_size_right
    if ends_q is not None:
        ends = ends_q, ends_k, most_q, most_k
        out, lse = _packed_forward(q, k, v, ends, scale, None, causal, *window, -1)
    else:
        out, lse = _attend(q, k, v, scale, None, _pattern(q, k, causal, *window, -1))
    nothing = torch.zeros((), dtype=torch.int64)
    return out, lse.float(), nothing, nothing.clone(), q.new_zeros(0)


def _flash_backward(
    dout, q, k, v, out, lse, ends_q, ends_k, most_q, most_k, dropout, causal, seed, offset, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    window = window_size_left, window_size_right
    if ends_q is not None:
        ends = ends_q, ends_k, most_q, most_k
        return tuple(_packed_backward((dout, q, k, v, out, lse), ends, scale, None, causal, *window, -1))
    x = _of_out(dout, q, k, v, out, lse)
    return tuple(_backward(x, scale, None, _pattern(q, k, causal, *window, -1)))


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    product = a.to(dtype) @ b.to(dtype)
    return product if out is None else out.copy_(product)


def _addmm(
    x: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    product = alpha * (a.to(dtype) @ b.to(dtype))
    product = product if beta == 0 else product + beta * x.to(dtype)
    return product if out is None else out.copy_(product)


OPERATORS = {
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "mm.dtype": _mm,
    "mm.dtype_out": _mm,
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm,
}
"""Operators of torch that CUDA alone has."""


def _lists(pattern: Any, name: str, q: Any, *, by_columns: bool) -> list[Any]:
    """Return the lists of blocks that our own kernel reads, made as for the GPU."""
    sizes = own.launch(name, 32, 2, (9, 0), own.diagonals(pattern) is None)
    lists = own._lists(pattern, sizes, q.device, by_columns=by_columns)
    return [x for x in lists if isinstance(x, CudaTensor)]


def _merge_forward(q, k, v, pattern, scores, out, lse, *, fresh):
    reads = [q, k, v, *_lists(pattern, "forward", q, by_columns=False)]
    launch("triton forward", reads if fresh else [*reads, out, lse], [out, lse], rank=q.rank)
    with on_host():
        share = REFERENCE.forward(*map(values_of, (q, k, v)), pattern, scores)
        total = out.values, lse.values
        if fresh:
            _fill(share, total)
        else:
            rowwise.combine([total, (share[0], share[1].to(lse.dtype))], *total)


def _add(name: str, inputs: BackwardInputs, pattern, scores, into: dict[int, Any], fresh: set[int]):
    given = [x for x in inputs if x is not None] + _lists(pattern, name, inputs.q, by_columns=name != "dq")
    read = [total for index, total in into.items() if index not in fresh]
    launch(f"triton {name}", given + read, list(into.values()), rank=inputs.q.rank)
    with on_host():
        shares = REFERENCE.backward(BackwardInputs(*map(values_of, inputs)), pattern, scores)
        for index, total in into.items():
            (total.values.copy_ if index in fresh else total.values.add_)(shares[index])


def _add_dq(inputs, pattern, scores, dq, *, fresh):
    _add("dq", inputs, pattern, scores, {0: dq}, {0} if fresh else set())


def _add_dkv(inputs, pattern, scores, dk, dv, *, fresh):
    _add("dkv", inputs, pattern, scores, {1: dk, 2: dv}, {1, 2} if fresh else set())


def _add_all(inputs, pattern, scores, dq, dk, dv, *, fresh_dq, fresh_dkv):
    if fresh_dq:
        dq.zero_()
    _add("all", inputs, pattern, scores, {0: dq, 1: dk, 2: dv}, {1, 2} if fresh_dkv else set())


def _at_once(inputs, scores):
    return not scores.deterministic


def _own_forward(q, k, v, pattern, scores):
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=of_parts(q.dtype))
    _merge_forward(q, k, v, pattern, scores, out, lse, fresh=True)
    return out, lse


def _own_backward(inputs, pattern, scores):
    dq, dk, dv = (
        torch.empty_like(x, dtype=wide(x.dtype), memory_format=torch.contiguous_format)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    _add_all(inputs, pattern, scores, dq, dk, dv, fresh_dq=True, fresh_dkv=True)
    return dq, dk, dv


OWN = InPlace(_merge_forward, _add_dq, _add_dkv, _at_once, _add_all)


class Rows:
    """`rowwise_triton`: one launch each."""

    @staticmethod
    def delta_rows(dout, out, delta):
        launch("delta", [dout, out], [delta], rank=out.rank)
        with on_host():
            delta.values.copy_(rowwise.row_delta(dout.values, out.values))

    @staticmethod
    def stand_in_rows(dout, delta, out, faint):
        launch("stand-in", [dout, delta], [out], rank=out.rank)
        with on_host():
            rowwise.output_stand_in(dout.values, delta.values, out.values)

    @staticmethod
    def combine_rows(parts, out, lse):
        launch("combine", [x for part in parts for x in part], [out, lse], rank=out.rank)
        with on_host():
            rowwise.combine([tuple(map(values_of, part)) for part in parts], out.values, lse.values)

    @staticmethod
    def add_rows(parts, total):
        launch("add", parts, [total], rank=total.rank)
        with on_host():
            rowwise.add_up([*map(values_of, parts)], total.values)


class _OfLoss:
    """A Triton kernel of the loss: `kernel[grid](...)`, its arguments by name."""

    def __init__(self, kernel: Any, function: Any) -> None:
        self._signature = inspect.signature(kernel.fn)
        self._function = function

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, num_warps: int = 0, **options: Any) -> None:
            with on_host():
                self._function(SimpleNamespace(**self._signature.bind(*args, **options).arguments))

        return run


def _scaled_logits(x: Any) -> Tensor:
    z = x.logits.values.float()
    return (x.softcap * torch.tanh(z / x.softcap) if x.SOFTCAP else z) / x.temperature


def _statistics(x: Any) -> None:
    gradients = [x.out, x.columns] if x.GRADIENTS else []
    launch("statistics", [x.logits, x.labels, x.scale], [x.found, *gradients], rank=x.found.rank)
    z, label, found = _scaled_logits(x), x.labels.values, x.found.values
    lse, here = torch.logsumexp(z, 1), label >= 0
    found[0] = lse
    found[1] = z.gather(1, label.clamp(min=0)[:, None])[:, 0].where(here, 0.0)
    found[2], found[3] = z.sum(1), z.amax(1)
    found[4] = lse - (torch.softmax(z, 1) * z).sum(1)
    if x.GRADIENTS:
        _row_gradients(x, z, lse)


def _gradients_of_rows(x: Any) -> None:
    launch("gradients", [x.logits, x.labels, x.lse, x.scale], [x.out, x.columns], rank=x.out.rank)
    _row_gradients(x, _scaled_logits(x), x.lse.values)


def _row_gradients(x: Any, z: Tensor, lse: Tensor) -> None:
    scale, label = (x.scale.values / x.temperature)[:, None], x.labels.values
    g = torch.exp(z - lse[:, None]) * scale * (1 + 2 * x.z_loss * lse)[:, None]
    g -= scale * x.smoothing / x.vocabulary
    at, here = label.clamp(min=0)[:, None], (label >= 0)[:, None]
    g.scatter_add_(1, at, (-scale * (1 - x.smoothing)).where(here, 0.0))
    if x.SOFTCAP:
        g *= 1 - (z * x.temperature / x.softcap) ** 2
    x.columns.values.copy_(g.gather(1, at).where(here, 0.0)[:, 0])
    x.out.values.copy_(g)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put all kernels in place of those that need a device."""
    for name, function in OPERATORS.items():
        patch.setitem(STAND_INS, name, function)
    for _, make in NEWEST.values():
        for path, members in make().items():
            if "TE_DType" in members:
                members = {"TE_DType": {torch.bfloat16: "the type", torch.float16: "the type"}}
            _module(patch, path, members)
    versions = {name: version for name, (version, _) in NEWEST.items()}
    real = packages.importlib.metadata.version
    patch.setattr(packages.importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    packages.loaded.cache_clear()
    patch.setattr(wrappers, "LEAST", 1)
    patch.setattr(rowwise, "_code", lambda: Rows)
    for name, function in (("statistics_kernel", _statistics), ("gradients_kernel", _gradients_of_rows)):
        patch.setattr(rows_triton, name, _OfLoss(getattr(rows_triton, name), function))
    kernel = replace(table.KERNELS["triton"], forward=_own_forward, backward=_own_backward, in_place=OWN)
    patch.setitem(table.KERNELS, "triton", kernel)
    patch.setattr(api, "_PLAIN", (*api._PLAIN, CudaTensor))  # no operator: the way of a training step


def _module(patch: pytest.MonkeyPatch, path: str, members: dict[str, Any]) -> None:
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in sys.modules or depth == len(parts):
            patch.setitem(sys.modules, name, ModuleType(name))
    for name, function in members.items():
        if not inspect.isfunction(function) or not inspect.signature(function).parameters:
            setattr(sys.modules[path], name, function)
            continue
        kernel = as_kernel(f"{path}.{name}", function, ("dq", "dk", "dv"))
        signature = inspect.signature(function)
        kernel.__signature__ = signature  # type: ignore[attr-defined]
        setattr(sys.modules[path], name, _by_name(kernel, signature))


def _by_name(kernel: Any, signature: inspect.Signature) -> Any:
    """Return a kernel that is given all its arguments by name, so that its buffers are known."""

    def call(*args: Any, **options: Any) -> Any:
        return kernel(**signature.bind(*args, **options).arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
