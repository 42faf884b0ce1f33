"""The interface of a local kernel, which computes one tile on one device.

A kernel is independent of rings. In backward LSE and D of the whole row are inputs, so the gradients of a
tile are exact summands of the whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import NONE, Abilities, Pattern
from burst_mcore.attention.geometry.tiles import LARGE, Launches
from burst_mcore.attention.numerics.merge import GradientShare
from burst_mcore.attention.numerics.rowwise import output_stand_in
from burst_mcore.dtypes import wide


@dataclass(frozen=True)
class Problem:
    """The shapes, dtype and options of a call; head_dim is the width of queries and keys."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: bool = False
    deterministic: bool = False
    """Gradients must be bitwise equal between runs."""
    launches: Launches = field(default=LARGE, repr=False)
    """The work of a launch under the mask. It changes only the order in which "auto" tries kernels."""
    documents: bool = False
    """Whether the mask has documents: their lengths, and so the shapes of tiles, differ from call to call."""


class Scores(NamedTuple):
    """The options of a tile: s = scale q k^T, and with a softcap, softcap * tanh(s / softcap)."""

    scale: float
    softcap: float | None = None
    deterministic: bool = False
    """Gradients are bitwise equal between runs."""
    max_logit: bool = False
    """Whether the max logit of each head is wanted, too."""


Results = tuple[Tensor, Tensor]
"""out and lse of a tile: see `Forward`."""
Shares = tuple[GradientShare, GradientShare]
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv: see `Backward`."""


class Forward(Protocol):
    """(out [B, M, H, Dv], lse [B, H, M]) of q [B, M, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv].

    Both results are new tensors that the caller may write. In rows without a key out is finite, and lse is
    -inf. lse is the natural logarithm, in at least float32; float64 where float32 would round too much.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results: ...


STEEP = {torch.float64: 2.0**40}
"""The factor a of scores, by dtype (default 2^14), for which log-sum-exp(a s) / a is the maximum of s.

max(s) <= LSE(a s) / a <= max(s) + log(keys) / a. GPUs compute exp2(fma(score, scale, -maximum)) with a
rounded maximum: the exponent is off by 2^-24 of the maximum, finite for scores up to 100,000 at 2^14, and for
none at 2^40."""


class BackwardInputs(NamedTuple):
    """The inputs of a tile's backward, with the statistics of the WHOLE row: lse and delta [B, H, M], wide.

    `out` [B, M, H, Dv] is the forward's, or any tensor with rowsum(dout * out) = delta. Kernels with
    `takes_delta` read delta and get no out; other kernels compute delta from out. `Kernel.shares` makes one.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor

    def with_output(self) -> BackwardInputs:
        """Return the inputs with the output, or a stand-in for O if it is missing."""
        return self if self.out is not None else self._replace(out=output_stand_in(self.dout, self.delta))


class Backward(Protocol):
    """(dq, dk, dv) of this tile, new tensors in the dtypes of q, k, v: summands of the whole gradients.

    With P = exp(s - lse): dv = P^T dout, dS = P * (dout v^T - delta), dq = scale dS k, dk = scale dS^T q
    (BurstEngine, equation 8 and algorithm 2). A softcap multiplies dS by tanh' = 1 - (s / softcap)^2.
    """

    def __call__(self, inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients: ...


class InPlace(NamedTuple):
    """Functions of a kernel that merge or add its results into running sums in the same launch.

    Sums are views [B, M or N, H or Hkv, D], lse [B, H, M], in any dtype; `fresh` sums are uninitialised. For
    a row of d elements, a tile then moves 8 d bytes in float32 (4 d if fresh). Without these functions the
    kernel writes d s bytes, of s bytes an element, and another pass moves d (s + 8) more.
    """

    merge_forward: Callable[..., None]
    """(q, k, v, pattern, scores, out, lse, *, fresh)."""
    add_dq: Callable[..., None]
    """(inputs, pattern, scores, dq, *, fresh)."""
    add_dkv: Callable[..., None]
    """(inputs, pattern, scores, dk, dv, *, fresh)."""
    at_once: Callable[[BackwardInputs, Scores], bool]
    """Whether one launch computes all gradients of a tile (`add_all`), with one computation of scores."""
    add_all: Callable[..., None]
    """(inputs, pattern, scores, dq, dk, dv, *, fresh_dq, fresh_dkv)."""


@dataclass(frozen=True)
class Kernel:
    """A row of the table of kernels. `supports(problem)` is None, or the reason why it is unsupported."""

    name: str
    supports: Callable[[Problem], str | None]
    forward: Forward
    backward: Backward
    takes_delta: bool = False
    _: KW_ONLY
    abilities: Abilities = NONE
    in_place: InPlace | None = None
    prepare: Callable[..., None] | None = None
    """(patterns, problem, device, *, forward): called before the tiles of a pass, with all their patterns."""

    def max_logit(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Tensor:
        """Return the max logit of each head of a tile, [H], by one more forward: see `STEEP`."""
        steep = STEEP.get(q.dtype, 2.0**14)
        lse = self.forward(q, k, v, pattern, Scores(scores.scale * steep))[1]
        return (lse.amax((0, 2)) / steep).to(wide(q.dtype))

    def shares(
        self, inputs: BackwardInputs, pattern: Pattern, scores: Scores, *, queries_rotate: bool, large: bool
    ) -> Shares:
        """Return a tile's gradients: first of the staying side, then of the rotating side.

        They must be added in this order, since one launch may compute both. The rotating sums are still in
        flight then: the rotating gradients are kept in separate memory until the sums arrive.

        large: the results are large, and queries rotate: more launches may halve their memory.
        """
        if not (self.takes_delta or self.in_place):
            if large and inputs.k.shape[2] % 2 == 0 and (pattern.full or pattern.causal):
                return self._by_halves(inputs, pattern, scores)
            inputs = inputs.with_output()
        if not self.in_place:
            dq, dk, dv = self.backward(inputs, pattern, scores)
            return ((dk, dv), (dq,)) if queries_rotate else ((dq,), (dk, dv))
        _, add_dq, add_dkv, at_once, add_all = self.in_place
        if not at_once(inputs, scores):
            of_queries, of_keys = (partial(add, inputs, pattern, scores) for add in (add_dq, add_dkv))
            return (of_keys, of_queries) if queries_rotate else (of_queries, of_keys)
        rotating = tuple(
            torch.empty_like(x, dtype=wide(x.dtype), memory_format=torch.contiguous_format)
            for x in ((inputs.q,) if queries_rotate else (inputs.k, inputs.v))
        )

        def staying(*sums: Tensor, fresh: bool) -> None:
            if queries_rotate:
                add_all(inputs, pattern, scores, *rotating, *sums, fresh_dq=True, fresh_dkv=fresh)
            else:
                add_all(inputs, pattern, scores, *sums, *rotating, fresh_dq=fresh, fresh_dkv=True)

        return staying, rotating

    def _by_halves(self, inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Shares:
        """Return the gradients of two launches, each of half of the heads; dK and dV stay, dQ rotates.

        The first half is added before the second launch: so at most half of the stand-in for O, of dK and of
        dV is in memory. dQ stays pending, in halves.
        """
        waiting: list[Tensor] = []

        def add(half: int, sums: Sequence[Tensor], shares: Sequence[Tensor], *, fresh: bool) -> None:
            for total, share in zip(sums, shares, strict=True):
                to = total.chunk(2, -2)[half]
                (to.copy_ if fresh else to.add_)(share)

        def staying(*sums: Tensor, fresh: bool) -> None:
            for half in (0, 1):
                views = [x if x is None else x.chunk(2, -2)[half] for x in inputs]
                of_half = BackwardInputs(*views)  # type: ignore[arg-type]  # out alone may be None
                dq, *shares = self.backward(of_half.with_output(), pattern, scores)
                waiting.append(dq)
                add(half, sums, shares, fresh=fresh)
                del shares  # their memory is free before the next launch

        def rotating(total: Tensor, *, fresh: bool) -> None:
            for half, share in enumerate(waiting):
                add(half, (total,), (share,), fresh=fresh)

        return staying, rotating
