"""The two passes of distributed attention: tiles x kernel x merge, driven by the ring.

Letters: B batch, S local rows, H query heads, D head dim. q, k, v, out and their gradients are [B, S, H, D];
the statistics lse and delta are [B, H, S].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.kernels.kernel import Kernel, RowGradients
from burst_mcore.attention.mask import Mask
from burst_mcore.attention.merge import GradientSum, OnlineSoftmax, wide
from burst_mcore.attention.plan import Tile, tiles
from burst_mcore.attention.ring import Bundle, Ring, Transport
from burst_mcore.attention.schedule import flat_ring, home_sum
from burst_mcore.layout import Layout


@dataclass(frozen=True)
class Call:
    """All of a call that is not a tensor: what crosses autograd."""

    rank: int
    size: int
    layout: Layout
    mask: Mask
    n: int
    """Tokens in the global sequence."""
    scale: float
    kernel: Kernel
    direction: str
    """What travels in backward: "query" or "kv"."""
    grad_dtype: torch.dtype
    transport: Transport

    def tiles(self, q_rank: int, k_rank: int) -> tuple[Tile, ...]:
        """Where the queries of one rank meet the keys of another."""
        return tiles(self.layout, self.mask, self.n, q_rank, k_rank, self.size)


class Queries(NamedTuple):
    """The query side of backward, in the order in which it travels."""

    q: Tensor
    dout: Tensor
    delta: Tensor
    lse: Tensor


class Keys(NamedTuple):
    """The key side."""

    k: Tensor
    v: Tensor


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries over the whole sequence: K, V travel (paper algorithm 4)."""
    softmax = OnlineSoftmax(q, value_dim=v.shape[-1])

    def compute(source: int, bundle: Bundle) -> None:
        k_source, v_source = bundle
        for tile in call.tiles(call.rank, source):
            out, lse = call.kernel.forward(
                rows(q, tile.q),
                rows(k_source, tile.k),
                rows(v_source, tile.k),
                causal=tile.causal,
                scale=call.scale,
            )
            softmax.add(tile.q, out, lse)

    ring = Ring(call.transport, home=_sendable(call, (k, v)))
    ring.run(flat_ring(call.rank, call.size, gradients=False), compute)
    return softmax.result()


def backward(call: Call, queries: Queries, keys: Keys, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): one side travels, its gradient a step behind; the other stays (algorithms 1 and 2).

    `out` is that of the rank's own queries; it never travels.
    """
    return _Backward(call, queries, keys, out).run()


class _Backward:
    def __init__(self, call: Call, queries: Queries, keys: Keys, out: Tensor) -> None:
        self.call = call
        self.query_travels = call.direction == "query"
        self.queries, self.keys, self.out = queries, keys, out
        q_side: Bundle = (queries.q,)
        k_side: Bundle = (keys.k, keys.v)
        self.travelling, staying = (q_side, k_side) if self.query_travels else (k_side, q_side)
        self.staying = tuple(GradientSum(like=tensor) for tensor in staying)
        self.shares: list[tuple[range, Bundle]] = []
        """Gradients of the travelling bundle from the last compute, by its rows."""

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        home: Bundle = self.queries if self.query_travels else self.keys
        ring = Ring(self.call.transport, home=_sendable(self.call, home), new_sum=self._new_sum)
        ring.run(flat_ring(self.call.rank, self.call.size, gradients=True), self.compute, self.accumulate)
        arrived = ring.buffer(home_sum(self.call.size))
        went = tuple(total.to(like.dtype) for total, like in zip(arrived, self.travelling, strict=True))
        stayed = tuple(total.result() for total in self.staying)
        dq, dk, dv = (*went, *stayed) if self.query_travels else (*stayed, *went)
        return dq, dk, dv

    def compute(self, source: int, bundle: Bundle) -> None:
        """The gradients of one bundle against this rank's own tensors, tile by tile."""
        if self.query_travels:
            queries, keys, met = Queries(*bundle), self.keys, self.call.tiles(source, self.call.rank)
        else:
            queries, keys, met = self.queries, Keys(*bundle), self.call.tiles(self.call.rank, source)
        for tile in met:
            own = not self.query_travels or source == self.call.rank
            dq, dk, dv = self._tile(tile, queries, keys, self.out if own else None)
            q_share, k_share = (tile.q, (dq,)), (tile.k, (dk, dv))
            goes, stays = (q_share, k_share) if self.query_travels else (k_share, q_share)
            self.shares.append(goes)
            for total, gradient in zip(self.staying, stays[1], strict=True):
                total.add(stays[0], gradient)

    def accumulate(self, sums: Bundle, first: bool) -> None:
        """Add the shares of the last compute to the travelling sums."""
        for total in sums if first else ():
            total.zero_()
        for at, gradients in self.shares:
            for total, gradient in zip(sums, gradients, strict=True):
                rows(total, at).add_(gradient)
        self.shares.clear()

    def _tile(
        self, tile: Tile, queries: Queries, keys: Keys, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_rows = slice(tile.q.start, tile.q.stop)
        dout, delta = rows(queries.dout, tile.q), queries.delta[:, :, of_rows]
        if self.call.kernel.takes_delta:
            out = None
        else:
            out = output_stand_in(dout, delta) if out is None else rows(out, tile.q)
        x = RowGradients(
            dout=dout,
            q=rows(queries.q, tile.q),
            k=rows(keys.k, tile.k),
            v=rows(keys.v, tile.k),
            out=out,
            lse=queries.lse[:, :, of_rows],
            delta=delta,
        )
        return self.call.kernel.backward(x, causal=tile.causal, scale=self.call.scale)

    def _new_sum(self) -> Bundle:
        return tuple(
            torch.empty(x.shape, dtype=self.call.grad_dtype, device=x.device) for x in self.travelling
        )


def rows(x: Tensor, at: range) -> Tensor:
    """Rows `at` of x [B, S, H, D], as a view."""
    return x[:, at.start : at.stop]


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """D = rowsum(dO * O), [B, H, S] in at least float32, contiguous."""
    dtype = wide(out.dtype)
    delta: Tensor = torch.linalg.vecdot(dout.to(dtype), out.to(dtype))
    return delta.transpose(1, 2).contiguous()


def output_stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor that stands in for O in kernels that read O only to form D: O projected on dO, row by row.

    out' = D dO / |dO|^2, 0 where dO = 0, has rowsum(dO * out') = D and |out'| <= |O|, so that O need not
    travel and no kernel be changed (DESIGN section 3). Rows are first scaled to max |dO| = 1, so that
    squares neither vanish nor overflow, however small the loss scale.
    """
    dout_wide = dout.to(wide(dout.dtype))
    largest = dout_wide.abs().amax(-1, keepdim=True)
    unit = dout_wide / largest
    along = delta.transpose(1, 2).unsqueeze(-1) / largest / unit.square().sum(-1, keepdim=True)
    return unit.mul_(along).masked_fill_(largest == 0, 0.0).to(dout.dtype)


def _sendable(call: Call, bundle: Bundle) -> Bundle:
    """Contiguous, as messages must be, if there is anybody to send to."""
    return tuple(x.contiguous() for x in bundle) if call.size > 1 else tuple(bundle)
