"""Rows: ranges of a position's rows, as sets, and as an index to read and write tensors.

Tensors are [B, S, H, D], or statistics [B, H, S]. As sets, rows ascend and are disjoint. As an index, they
may have gaps, and may descend.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

Rows = tuple[range, ...]
"""Rows of a position: ranges, one after another."""


def union(ranges: list[range]) -> Rows:
    """Return the rows in any of `ranges`, as ascending ranges with gaps between them."""
    joined: list[range] = []
    for span in sorted(ranges, key=lambda r: r.start):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        elif span:
            joined.append(span)
    return tuple(joined)


def index_of(rows: Rows, row: int) -> int:
    """Return the index of `row` among `rows`."""
    before = 0
    for span in rows:
        if row < span.stop:
            return before + row - span.start
        before += len(span)
    raise IndexError(row)


def count(rows: Rows) -> int:
    """Return how many rows these are."""
    return len(rows[0]) if len(rows) == 1 else sum(map(len, rows))


def axis(x: Tensor) -> int:
    """Return the dimension of rows in a tensor or a statistic."""
    return 1 if x.dim() == 4 else 2


def gather(x: Tensor, rows: Rows) -> Tensor:
    """Return these rows, in their order: a view if they are one ascending range, else a copy."""
    parts = [view.flip(axis(x)) if span.step < 0 else view for span, view in _views(x, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis(x))


def scatter_views(x: Tensor, rows: Rows, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of x, the share of `values` for that view): values[i] is for the i-th of the rows."""
    start = 0
    for span, view in _views(x, rows):
        share = values.narrow(axis(values), start, len(span))
        yield view, share.flip(axis(values)) if span.step < 0 else share
        start += len(span)


class WrittenRows:
    """The rows of a tensor that hold data; the others are uninitialised."""

    def __init__(self, rows: int) -> None:
        self._written = bytearray(rows)

    def mark(self, span: range) -> bytes:
        """Mark rows as written. Return by row, in ascending order, whether it was written before (1 or 0)."""
        first, last = (min(span[0], span[-1]), max(span[0], span[-1])) if span else (0, -1)
        place = slice(first, last + 1, abs(span.step))
        before = bytes(self._written[place])
        self._written[place] = b"\1" * len(span)
        return before


FEW = 4
"""Up to this many runs of rows are filled one by one; more are filled at once, by a mask."""


def fill(x: Tensor, written: bytes, value: float) -> None:
    """Set the rows of x that hold no data (0 in `written`)."""
    gaps = list(islice(_gaps(written), FEW + 1))
    if len(gaps) > FEW:
        empty = (torch.frombuffer(bytearray(written), dtype=torch.uint8) == 0).to(x.device, non_blocking=True)
        x.masked_fill_(empty.view(-1, *[1] * (x.dim() - 1 - axis(x))), value)
        return
    for first, last in gaps:
        x.narrow(axis(x), first, last - first).fill_(value)


def _gaps(written: bytes) -> Iterator[tuple[int, int]]:
    last = 0
    while (first := written.find(0, last)) >= 0:
        last = written.find(1, first)
        last = len(written) if last < 0 else last
        yield first, last


def view(x: Tensor, rows: Rows) -> Tensor | None:
    """Return these rows without a copy, or None if they are not one ascending range."""
    return gather(x, rows) if len(rows) == 1 and rows[0].step == 1 else None


def add_(total: Tensor, rows: Rows, values: Tensor, written: WrittenRows) -> None:
    """total[rows] += values, where rows that were not written count as zero."""
    for span, (to, share) in zip(rows, scatter_views(total, rows, values), strict=True):
        before = written.mark(span)
        if 1 not in before:
            to.copy_(share)
            continue
        fill(to, before, 0.0)
        to += share


def relative_to(stored: Rows | None, rows: Rows) -> Rows:
    """Return the places of `rows` in a tensor that has room for the rows `stored` alone (None: for all)."""
    if stored is None:
        return rows
    shifts = [index_of(stored, min(span[0], span[-1])) - min(span[0], span[-1]) for span in rows]
    return tuple(_shifted(span, by) for span, by in zip(rows, shifts, strict=True))


def _shifted(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by, rows.step)


def _views(x: Tensor, rows: Rows) -> Iterator[tuple[range, Tensor]]:
    along = axis(x)
    for span in rows:
        up = span if span.step > 0 else span[::-1]
        if up.step == 1 or not up:
            yield span, x.narrow(along, up.start if up else 0, len(up))
        else:
            spread = slice(up.start, up.stop, up.step)
            yield span, x[:, spread] if along == 1 else x[:, :, spread]
