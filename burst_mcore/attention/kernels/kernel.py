"""What a local kernel is: one tile on one device.

It never sees a ring: the softmax statistics of the whole row come from outside in backward, so the gradients
of a tile are its exact share of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import NONE, Abilities, Seen


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to serve. head_dim is that of queries and keys, value_dim that of values."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: bool = False
    deterministic: bool = False
    """Gradients must be bitwise equal between runs."""
    sparse: bool = False
    """Its mask is (`Mask.is_sparse`). What a kernel can serve does not depend on it, nor on the next: "auto"
    tries kernels in another order."""
    window: bool = False
    """Its mask has one (`Mask.has_window`)."""


class Scores(NamedTuple):
    """How scores are made of q and k: s = scale q k^T, then softcap * tanh(s / softcap) if that is given."""

    scale: float
    softcap: float | None = None
    deterministic: bool = False
    """Gradients are bitwise equal between runs."""


class Forward(Protocol):
    """(out [B, M, H, Dv], lse [B, H, M]) of q [B, M, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv].

    Both results are new tensors that the caller may write; out is finite in rows that see no key, their lse
    is -inf. lse is natural-log, in at least float32.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]: ...


class RowGradients(NamedTuple):
    """What a tile's backward needs, with the statistics of the WHOLE row: lse and delta [B, H, M].

    `out` [B, M, H, Dv] is the forward's, or any tensor with rowsum(dout * out) = delta: kernels that do not
    take delta form it from out, those with `takes_delta` read delta and get no out.
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

    With P = exp(s - lse): dv = P^T dout, dS = P * (dout v^T - delta), dq = scale dS k, dk = scale dS^T q; a
    softcap multiplies dS by 1 - (s / softcap)^2.
    """

    def __call__(self, x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]: ...


class InPlace(NamedTuple):
    """What a kernel can do besides: merge and add its results into running sums, with no further pass.

    Sums are views [B, M or N, H or Hkv, D], lse [B, H, M], in any dtype; `fresh` ones are uninitialised. Of
    a row of d elements, a tile then moves 8 d bytes in float32 (4 d if fresh); elsewhere the kernel writes
    d s bytes, s to an element, and a pass moves d (s + 8) more.
    """

    merge_forward: Callable[..., None]
    """(q, k, v, seen, how, out, lse, *, fresh)."""
    add_dq: Callable[..., None]
    """(x, seen, how, dq, *, fresh)."""
    add_dkv: Callable[..., None]
    """(x, seen, how, dk, dv, *, fresh)."""


@dataclass(frozen=True)
class Kernel:
    """One row of the table. `supports(problem)` is None, or the reason why it cannot serve."""

    name: str
    supports: Callable[[Problem], str | None]
    forward: Forward
    backward: Backward
    takes_delta: bool = False
    _: KW_ONLY
    abilities: Abilities = NONE
    in_place: InPlace | None = None
