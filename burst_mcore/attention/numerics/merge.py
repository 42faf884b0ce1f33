"""Sums that start by adopting their first term: the online softmax of partial outputs, and of gradients.

Where a single tile covers all rows (one rank, or one step of a ring that has no other), nothing is copied.
Letters: B batch, S rows, H heads, D head dim.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, Visited, add_, count, fill, pieces, take, view
from burst_mcore.attention.numerics.rowwise import merge_
from burst_mcore.dtypes import wide


class OnlineSoftmax:
    """The running (out, lse) of one rank's queries over the tiles that it has met.

    sinks [H]: scores that are there from the beginning, with values of zero.
    """

    def __init__(self, q: Tensor, value_dim: int, sinks: Tensor | None = None) -> None:
        self._q, self._value_dim, self._sinks = q, value_dim, sinks
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._visited = Visited(q.shape[1])
        if sinks is not None:
            self._visited.visit(range(q.shape[1]))

    def add(self, rows: Rows, out_t: Tensor, lse_t: Tensor) -> None:
        """Take in a tile's out [B, M, H, D] and lse [B, H, M] of these M rows; both may be kept."""
        if self._out is None and self._sinks is None and rows == (range(self._q.shape[1]),):
            self._out, self._lse = out_t, lse_t
            self._visited.visit(rows[0])
            return
        out, lse = self._wide()
        for at, (out_at, out_new), (lse_at, lse_new) in zip(
            rows, pieces(out, rows, out_t), pieces(lse, rows, lse_t), strict=True
        ):
            held = self._visited.visit(at)
            if 1 not in held:
                out_at.copy_(out_new)
                lse_at.copy_(lse_new)
            else:
                _blank(out_at, lse_at, held)
                merge_(out_at, lse_at, out_new, lse_new)

    def running(self, rows: Rows) -> tuple[Tensor, Tensor, bool] | None:
        """(out, lse) of these rows to merge into in place, and whether nothing is in them yet.

        None if they cannot be had without a copy.
        """
        if view(self._q, rows) is None:
            return None
        if self._out is None and self._sinks is None and count(rows) == self._q.shape[1]:
            self._visited.visit(rows[0])  # nothing is read of what is set as a whole
            out, lse = self._room()
            return out, lse, True
        out, lse = (take(x, rows) for x in self._wide())
        held = self._visited.visit(rows[0])
        fresh = 1 not in held
        if not fresh:
            _blank(out, lse, held)
        return out, lse, fresh

    def result(self) -> tuple[Tensor, Tensor]:
        """(out [B, S, H, D] in the queries' dtype, lse [B, H, S] in at least float32)."""
        out, lse = self._complete(range(self._q.shape[1]))
        return out.to(self._q.dtype), lse

    def rows(self, at: range) -> tuple[Tensor, Tensor]:
        """(out, lse) of these rows, so far."""
        out, lse = self._complete(at)
        return out[:, at.start : at.stop], lse[:, :, at.start : at.stop]

    def _complete(self, at: range) -> tuple[Tensor, Tensor]:
        """(out, lse) of all rows, of which these hold something by now."""
        if self._out is None or self._lse is None:
            self._wide()
        assert self._out is not None and self._lse is not None
        if at:
            _blank(take(self._out, (at,)), take(self._lse, (at,)), self._visited.visit(at))
        return self._out, self._lse

    def _room(self) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = self._q.shape
        dtype = wide(self._q.dtype)
        self._out = self._q.new_empty((batch, rows, heads, self._value_dim), dtype=dtype)
        self._lse = self._q.new_empty((batch, heads, rows), dtype=dtype)
        return self._out, self._lse

    def _wide(self) -> tuple[Tensor, Tensor]:
        dtype = wide(self._q.dtype)
        if self._out is None or self._lse is None:
            self._out, self._lse = self._room()
            if self._sinks is not None:
                self._out.zero_()
                self._lse.copy_(self._sinks[:, None])
        self._out = self._out.to(dtype)
        return self._out, self._lse


def _blank(out: Tensor, lse: Tensor, held: bytes) -> None:
    """Say of the rows that hold nothing that they have seen no key."""
    fill(out, held, 0.0)
    fill(lse, held, -torch.inf)


class GradientSum:
    """The running gradient of a tensor, in at least float32."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None
        self._dtype = wide(like.dtype)
        self._visited = Visited(like.shape[1])

    @classmethod
    def into(cls, total: Tensor, *, fresh: bool) -> Self:
        """That in `total`, in its dtype: uninitialised if `fresh`, else a sum to go on with."""
        found = cls(total)
        found._sum, found._dtype = total, total.dtype
        if not fresh:
            found._visited.visit(range(total.shape[1]))
        return found

    def add(self, rows: Rows, gradient: Tensor) -> None:
        """Take in a tile's gradient [B, M, H, D] of these M rows; it may be kept and written."""
        if self._sum is None and rows == (range(self._like.shape[1]),):
            self._sum = gradient
            self._visited.visit(rows[0])
            return
        add_(self._wide(), rows, gradient, self._visited)

    def running(self, rows: Rows) -> tuple[Tensor, bool] | None:
        """The sum of these rows to add to in place, and whether nothing is in it yet.

        None if it cannot be had without a copy.
        """
        if view(self._like, rows) is None:
            return None
        total = take(self._wide(), rows)
        held = self._visited.visit(rows[0])
        fresh = 1 not in held
        if not fresh:
            fill(total, held, 0.0)
        return total, fresh

    def apart(self, rows: Rows) -> Tensor:
        """Room for a share of these rows, uninitialised."""
        shape = (self._like.shape[0], count(rows), *self._like.shape[2:])
        return self._like.new_empty(shape, dtype=self._dtype)

    def rows(self, at: range) -> Tensor:
        """The sum of these rows, so far."""
        return take(self.complete(), (at,))

    def result(self) -> Tensor:
        """The sum, in the dtype of `like`; zeros where nothing came."""
        return self.complete().to(self._like.dtype)

    def complete(self) -> Tensor:
        """The sum of all rows, zeros where nothing came."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        fill(self._sum, self._visited.visit(range(self._sum.shape[1])), 0.0)
        return self._sum

    def _wide(self) -> Tensor:
        if self._sum is None:
            self._sum = torch.empty_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        self._sum = self._sum.to(self._dtype)
        return self._sum
