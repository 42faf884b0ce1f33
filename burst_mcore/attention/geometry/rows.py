"""Some of the rows of a position: sets of them, and reading and writing them in tensors.

Tensors are [B, S, H, D], or statistics [B, H, S]. Rows are ranges, one after another. As sets they ascend and
are disjoint; to be taken, they may have gaps, and may descend.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

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

    def __init__(self, rows: int) -> None:
        self._held = bytearray(rows)

    def visit(self, at: range) -> bytes:
        """Mark these rows; by row, in ascending order, whether it held something until now (1 or 0)."""
        where = slice(min(at[0], at[-1]), max(at[0], at[-1]) + 1, abs(at.step)) if at else slice(0)
        before = bytes(self._held[where])
        self._held[where] = b"\1" * len(at)
        return before


FEW = 4
"""So many runs of rows are filled one by one; more of them at once, by a mask."""


def fill(x: Tensor, held: bytes, value: float) -> None:
    """Set the rows of x that hold nothing (0 in `held`)."""
    gaps = list(islice(_gaps(held), FEW + 1))
    if len(gaps) > FEW:
        empty = (torch.frombuffer(bytearray(held), dtype=torch.uint8) == 0).to(x.device, non_blocking=True)
        x.masked_fill_(empty.view(-1, *[1] * (x.dim() - 1 - axis(x))), value)
        return
    for first, last in gaps:
        x.narrow(axis(x), first, last - first).fill_(value)


def _gaps(held: bytes) -> Iterator[tuple[int, int]]:
    last = 0
    while (first := held.find(0, last)) >= 0:
        last = held.find(1, first)
        last = len(held) if last < 0 else last
        yield first, last


def view(x: Tensor, rows: Rows) -> Tensor | None:
    """These rows without a copy, if they are one ascending range."""
    return take(x, rows) if len(rows) == 1 and rows[0].step == 1 else None


def add_(total: Tensor, rows: Rows, values: Tensor, visited: Visited) -> None:
    """total[rows] += values, where what was not visited counts as zero."""
    for at, (to, share) in zip(rows, pieces(total, rows, values), strict=True):
        held = visited.visit(at)
        if 1 not in held:
            to.copy_(share)
            continue
        fill(to, held, 0.0)
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
    along = axis(x)
    for at in rows:
        up = at if at.step > 0 else at[::-1]
        if up.step == 1 or not up:
            yield at, x.narrow(along, up.start if up else 0, len(up))
        else:
            spread = slice(up.start, up.stop, up.step)
            yield at, x[:, spread] if along == 1 else x[:, :, spread]
