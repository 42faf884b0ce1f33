"""Some of the rows of a position: sets of them, and reading and writing them in tensors.

Tensors are [B, S, H, D], or statistics [B, H, S]. Rows are ranges, one after another. As sets they ascend and
are disjoint; to be taken, they may have gaps, and may descend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Rows = tuple[range, ...]
"""Rows of a position."""


def union(ranges: list[range]) -> Rows:
    """The rows in any of `ranges`, as ascending ranges with gaps between them."""
    joined: list[range] = []
    for each in sorted(ranges, key=lambda r: r.start):
        if joined and each.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, each.stop))
        elif each:
            joined.append(each)
    return tuple(joined)


def place(rows: Rows, row: int) -> int:
    """Where `row` stands among `rows`."""
    before = 0
    for each in rows:
        if row < each.stop:
            return before + row - each.start
        before += len(each)
    raise IndexError(row)


def count(rows: Rows) -> int:
    """How many rows these are."""
    return sum(map(len, rows))


def axis(x: Tensor) -> int:
    """The dimension of rows."""
    return 1 if x.dim() == 4 else 2


def take(x: Tensor, rows: Rows) -> Tensor:
    """These rows, in their order: a view if they are one ascending range, else a copy."""
    parts = [view.flip(axis(x)) if at.step < 0 else view for at, view in _views(x, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis(x))


def pieces(x: Tensor, rows: Rows, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(view of x, the share of `values` that belongs there): values[i] belongs to the i-th of the rows."""
    start = 0
    for at, view in _views(x, rows):
        share = values.narrow(axis(values), start, len(at))
        yield view, share.flip(axis(values)) if at.step < 0 else share
        start += len(at)


class Visited:
    """Which rows of a tensor hold something; the rest is uninitialised."""

    def __init__(self) -> None:
        self.rows: Rows = ()

    def visit(self, at: range) -> Rows:
        """Mark these rows, and all between them; which of them were empty until now."""
        hull = range(min(at[0], at[-1]), max(at[0], at[-1]) + 1)
        before = [range(max(r.start, hull.start), min(r.stop, hull.stop)) for r in self.rows]
        edges = [hull.start, *(edge for r in before if r for edge in (r.start, r.stop)), hull.stop]
        self.rows = union([*self.rows, hull])
        return tuple(range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def view(x: Tensor, rows: Rows) -> Tensor | None:
    """These rows without a copy, if they are one ascending range."""
    return take(x, rows) if len(rows) == 1 and rows[0].step == 1 else None


def add_(total: Tensor, rows: Rows, values: Tensor, visited: Visited) -> None:
    """total[rows] += values, where what was not visited counts as zero."""
    for at, (to, share) in zip(rows, pieces(total, rows, values), strict=True):
        empty = visited.visit(at)
        if abs(at.step) == 1 and count(empty) == len(at):
            to.copy_(share)
            continue
        for gap in empty:
            take(total, (gap,)).zero_()
        to += share


def within(held: Rows | None, rows: Rows) -> Rows:
    """Where `rows` lie in a tensor that holds only the rows `held` (None: all)."""
    if held is None:
        return rows
    shifts = [place(held, min(at[0], at[-1])) - min(at[0], at[-1]) for at in rows]
    return tuple(_shifted(at, by) for at, by in zip(rows, shifts, strict=True))


def _shifted(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by, rows.step)


def _views(x: Tensor, rows: Rows) -> Iterator[tuple[range, Tensor]]:
    for at in rows:
        up = at if at.step > 0 else at[::-1]
        view = x.narrow(axis(x), up.start, up[-1] + 1 - up.start) if up else x.narrow(axis(x), 0, 0)
        if up.step > 1:
            view = view[:, :: up.step] if axis(x) == 1 else view[:, :, :: up.step]
        yield at, view
