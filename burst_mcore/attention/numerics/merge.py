"""Sums that start by adopting their first term: the online softmax of partial outputs, and of gradients.

Where a single tile covers all rows (one rank, or a ring with a single step), nothing is copied.
Letters: B batch, S rows, H heads, D head dim.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import (
    Rows,
    WrittenRows,
    add_,
    count,
    fill,
    gather,
    scatter_views,
    view,
)
from burst_mcore.attention.numerics.rowwise import merge_
from burst_mcore.dtypes import wide


class OnlineSoftmax:
    """The running (out, lse) of one rank's queries over the tiles that it has met.

    sinks [H]: scores that take part from the beginning, with values of zero.
    """

    def __init__(self, q: Tensor, value_dim: int, sinks: Tensor | None = None) -> None:
        self._q, self._value_dim, self._sinks = q, value_dim, sinks
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._written = WrittenRows(q.shape[1])
        if sinks is not None:
            self._written.mark(range(q.shape[1]))

    def add(self, rows: Rows, out_t: Tensor, lse_t: Tensor) -> None:
        """Merge a tile's out [B, M, H, D] and lse [B, H, M] of these M rows; this may keep and write both."""
        if self._out is None and self._sinks is None and rows == (range(self._q.shape[1]),):
            self._out, self._lse = out_t, lse_t
            self._written.mark(rows[0])
            return
        out, lse = self._wide()
        for span, (out_rows, out_new), (lse_rows, lse_new) in zip(
            rows, scatter_views(out, rows, out_t), scatter_views(lse, rows, lse_t), strict=True
        ):
            before = self._written.mark(span)
            if 1 not in before:
                out_rows.copy_(out_new)
                lse_rows.copy_(lse_new)
            else:
                _blank(out_rows, lse_rows, before)
                merge_(out_rows, lse_rows, out_new, lse_new)

    def running(self, rows: Rows) -> tuple[Tensor, Tensor, bool] | None:
        """Return (out, lse) of these rows to merge into in place, and whether they hold no data yet.

        None if a copy would be needed.
        """
        if view(self._q, rows) is None:
            return None
        if self._out is None and self._sinks is None and count(rows) == self._q.shape[1]:
            self._written.mark(rows[0])  # all rows will be set before any is read
            out, lse = self._room()
            return out, lse, True
        out, lse = (gather(x, rows) for x in self._wide())
        before = self._written.mark(rows[0])
        fresh = 1 not in before
        if not fresh:
            _blank(out, lse, before)
        return out, lse, fresh

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out [B, S, H, D] in the queries' dtype, lse [B, H, S] in at least float32)."""
        out, lse = self._complete(range(self._q.shape[1]))
        return out.to(self._q.dtype), lse

    def rows(self, span: range) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of these rows, so far."""
        out, lse = self._complete(span)
        return out[:, span.start : span.stop], lse[:, :, span.start : span.stop]

    def _complete(self, span: range) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of all rows, after blanking those of `span` that hold no data."""
        if self._out is None or self._lse is None:
            self._wide()
        assert self._out is not None and self._lse is not None
        if span:
            _blank(gather(self._out, (span,)), gather(self._lse, (span,)), self._written.mark(span))
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


def _blank(out: Tensor, lse: Tensor, written: bytes) -> None:
    """Set rows that hold no data to the results of rows that have seen no key."""
    fill(out, written, 0.0)
    fill(lse, written, -torch.inf)


class GradientSum:
    """The running gradient of a tensor, in at least float32."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None
        self._dtype = wide(like.dtype)
        self._written = WrittenRows(like.shape[1])

    @classmethod
    def into(cls, total: Tensor, *, fresh: bool) -> Self:
        """Return the sum in `total`, in its dtype: uninitialised if `fresh`, else a sum to go on with."""
        gradient_sum = cls(total)
        gradient_sum._sum, gradient_sum._dtype = total, total.dtype
        if not fresh:
            gradient_sum._written.mark(range(total.shape[1]))
        return gradient_sum

    def add(self, rows: Rows, gradient: Tensor) -> None:
        """Add a tile's gradient [B, M, H, D] of these M rows; this may keep and write it."""
        if self._sum is None and rows == (range(self._like.shape[1]),):
            self._sum = gradient
            self._written.mark(rows[0])
            return
        add_(self._wide(), rows, gradient, self._written)

    def running(self, rows: Rows) -> tuple[Tensor, bool] | None:
        """Return the sum of these rows to add to in place, and whether it holds no data yet.

        None if a copy would be needed.
        """
        if view(self._like, rows) is None:
            return None
        total = gather(self._wide(), rows)
        before = self._written.mark(rows[0])
        fresh = 1 not in before
        if not fresh:
            fill(total, before, 0.0)
        return total, fresh

    def apart(self, rows: Rows) -> Tensor:
        """Return room for a share of these rows, uninitialised."""
        shape = (self._like.shape[0], count(rows), *self._like.shape[2:])
        return self._like.new_empty(shape, dtype=self._dtype)

    def rows(self, span: range) -> Tensor:
        """Return the sum of these rows, so far."""
        return gather(self.complete(), (span,))

    def result(self) -> Tensor:
        """Return the sum, in the dtype of `like`; zeros where nothing was added."""
        return self.complete().to(self._like.dtype)

    def complete(self) -> Tensor:
        """Return the sum of all rows; zeros where nothing was added."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        fill(self._sum, self._written.mark(range(self._sum.shape[1])), 0.0)
        return self._sum

    def _wide(self) -> Tensor:
        if self._sum is None:
            self._sum = torch.empty_like(self._like, dtype=self._dtype, memory_format=torch.contiguous_format)
        self._sum = self._sum.to(self._dtype)
        return self._sum
