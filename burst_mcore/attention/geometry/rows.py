"""Rows: ranges of a ring rank's rows, as sets, and as an index to read and write tensors.

Tensors are [B, S, H, D]; D and LSE are [B, H, S]. As sets, rows ascend and are disjoint. As an index, they
may have gaps, and may descend.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

Rows = tuple[range, ...]
"""Rows of a ring rank: ranges, one after another."""


def union(ranges: list[range]) -> Rows:
    """Return the rows in any of `ranges`, as ascending ranges with gaps between them."""
    rows: list[range] = []
    for span in sorted(ranges, key=lambda r: r.start):
        if rows and span.start <= rows[-1].stop:
            rows[-1] = range(rows[-1].start, max(rows[-1].stop, span.stop))
        elif span:
            rows.append(span)
    return tuple(rows)


def ascending(first: Tensor, stop: Tensor) -> Rows:
    """Return the rows of disjoint ascending ranges [first, stop), neighbours as one range."""
    gaps = first[1:] > stop[:-1]
    first, stop = torch.cat([first[:1], first[1:][gaps]]), torch.cat([stop[:-1][gaps], stop[-1:]])
    return tuple(map(range, first.tolist(), stop.tolist()))


@lru_cache(maxsize=1024)
def spans(read: tuple[Rows, ...]) -> Rows:
    """Return the rows from the first to the last of each range, joined."""
    ends = [sorted((span[0], span[-1])) for rows in read for span in rows]
    return union([range(first, last + 1) for first, last in ends])


def indices_of(rows: Rows, members: Iterable[int]) -> list[int]:
    """Return the index of each wanted row in ascending `rows` of step 1, which must contain all."""
    stops = [span.stop for span in rows]
    offsets = list(accumulate(map(len, rows), initial=0))
    spans = [(row, bisect_right(stops, row)) for row in members]
    return [offsets[index] + row - rows[index].start for row, index in spans]


def count(rows: Rows) -> int:
    """Return the number of rows."""
    return len(rows[0]) if len(rows) == 1 else sum(map(len, rows))


def axis(x: Tensor) -> int:
    """Return the dimension of rows in a tensor, D or LSE."""
    return 1 if x.dim() == 4 else 2


def gather(x: Tensor, rows: Rows) -> Tensor:
    """Return these rows, in this order: a view if they are one ascending range, else a copy."""
    if len(rows) == 1 and (span := rows[0]).step == 1:  # by far the most frequent
        along, many = 1 if x.dim() == 4 else 2, len(span)
        return x if many == x.shape[along] else x.narrow(along, span.start, many)
    parts = [strided(x, span) if span.step > 0 else strided(x, span[::-1]).flip(axis(x)) for span in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis(x))


def scatter_views(x: Tensor, rows: Rows, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of x, the share of `values` for that view): values[i] is for the i-th of the rows."""
    for span, share in shares(rows, values):
        yield strided(x, span), share


def shares(rows: Rows, values: Tensor) -> Iterator[tuple[range, Tensor]]:
    """Yield each range of the rows, ascending, with its share of `values` in that order."""
    if len(rows) == 1 and rows[0].step > 0:
        yield rows[0], values
        return
    start = 0
    for span in rows:
        share = values.narrow(axis(values), start, len(span))
        start += len(span)
        yield (span, share) if span.step > 0 else (span[::-1], share.flip(axis(values)))


def strided(x: Tensor, span: range) -> Tensor:
    """Return a view of these rows, an ascending range of any step."""
    if span.step == 1 or not span:
        along, many = axis(x), len(span)
        return x if many == x.shape[along] else x.narrow(along, span.start if span else 0, many)
    spread = slice(span.start, span.stop, span.step)
    return x[:, spread] if axis(x) == 1 else x[:, :, spread]


def relative_to(stored: Rows | None, rows: Rows) -> Rows:
    """Return the places of `rows` in a tensor of the rows `stored` (None: all rows)."""
    if stored is None:
        return rows
    if len(stored) == 1:  # by far the most frequent
        first = stored[0].start
        return tuple([range(span.start - first, span.stop - first, span.step) for span in rows])
    lowest = [min(span[0], span[-1]) for span in rows]
    shifts = [place - row for row, place in zip(lowest, indices_of(stored, lowest), strict=True)]
    pairs = zip(rows, shifts, strict=True)
    return tuple(range(span.start + shift, span.stop + shift, span.step) for span, shift in pairs)
