"""The table of local kernels, and the choice of one for a call.

A kernel attends one tile on one device. It never sees a ring: the softmax statistics of the whole row come
from outside in backward, so the gradients of a tile are its exact share of the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

logger = logging.getLogger("burst_mcore")


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to serve. head_dim is that of queries and keys, value_dim that of values."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class Forward(Protocol):
    """(out [B, M, H, Dv], lse [B, H, M]) of q [B, M, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv].

    Both results are new tensors that the caller may write; out is finite in rows that see no key, their lse
    is -inf. lse is natural-log, in at least float32.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class RowGradients(NamedTuple):
    """What a tile's backward needs, with the statistics of the WHOLE row: lse and delta [B, H, M].

    `out` [B, M, H, Dv] is any tensor with rowsum(dout * out) = delta; a kernel with `takes_delta` gets None
    for it and reads delta, the others read out and form delta themselves.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor


class Backward(Protocol):
    """(dq, dk, dv), new tensors, in the dtypes of q, k, v: this tile's share of the whole gradients.

    With P = exp(scale q k^T - lse): dv = P^T dout, dS = P * (dout v^T - delta), dq = scale dS k,
    dk = scale dS^T q.
    """

    def __call__(self, x: RowGradients, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class Kernel:
    """One row of the table. `supports(problem)` is None, or the reason why it cannot serve."""

    name: str
    supports: Callable[[Problem], str | None]
    forward: Forward
    backward: Backward
    takes_delta: bool


def table() -> dict[str, Kernel]:
    """All kernels by name, in the order in which "auto" tries them."""
    from burst_mcore.attention.kernels import aten, reference

    return {kernel.name: kernel for kernel in (*aten.KERNELS, reference.KERNEL)}


@lru_cache(maxsize=1024)
def choose(name: str, problem: Problem) -> Kernel:
    """The kernel called `name`, or the first in the table that serves if name is "auto".

    The choice is logged once for each problem; where "auto" ends at the reference kernel, which is slow and
    stores all scores, it is logged as a warning with the reasons of the others.

    Raises:
        ValueError: unknown name, or the kernel cannot serve the problem (with its reason).
    """
    kernels = table()
    if name != "auto":
        if name not in kernels:
            raise ValueError(f"unknown kernel {name!r}; legal: 'auto', {', '.join(map(repr, kernels))}")
        reason = kernels[name].supports(problem)
        if reason is not None:
            raise ValueError(f"kernel {name!r} cannot serve this call: {reason}")
        return kernels[name]
    refusals: list[str] = []
    for kernel in kernels.values():
        reason = kernel.supports(problem)
        if reason is None:
            level = logging.WARNING if kernel.name == "reference" else logging.INFO
            logger.log(level, "kernel %s for %s%s", kernel.name, problem, _because(refusals))
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    raise ValueError(f"no kernel serves this call{_because(refusals)}")


def _because(refusals: list[str]) -> str:
    return f" ({'; '.join(refusals)})" if refusals else ""
