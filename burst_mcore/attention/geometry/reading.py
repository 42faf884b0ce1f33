"""Remote rows: the rows of each ring rank that each other ring rank reads, as one table.

The rows of every ring rank are cut into segments, so short that a ring rank reads all of a segment or nothing
of it. Then the table is bool, readers x segments. A message carries the segments of a block that have a
reader further on. So a message needs one number a segment: its last reader on the path.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from math import gcd

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import band_pairs_of
from burst_mcore.attention.geometry.rows import Rows
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.layout import Layout
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.layout.kinds import Runs, joined_table
from burst_mcore.mask import Mask
from burst_mcore.mask.bands import (
    BLOCK,
    UNBOUNDED,
    intersected,
    of_classes,
    pairs_of_runs,
    tightened,
    transposed,
)

MOST = 2**27
"""The maximum entries of the table. Above it whole intervals count as read, or, with too many intervals,
every row: finding the few exceptions would cost more than it saves."""
STRIPES = 2**18
"""The maximum pairs of striped intervals times bands that are examined; above it every row counts as read.
Under one band the maximum is 2^8 times as large."""


class Reading:
    """The rows of each ring rank that each other ring rank reads.

    Attributes:
        size: number of ring ranks that own rows.
        rows: rows of a ring rank.
        owner, first, length: int64 [segments], in ascending order: the owner of a segment, its first row at
            the owner, and its length.
        read: bool [ring ranks, segments]: whether a ring rank reads a segment.
    """

    def __init__(self, size: int, rows: int, owner: Tensor, first: Tensor, length: Tensor, read: Tensor):
        self.size, self.rows = size, rows
        self.owner, self.first, self.length, self.read = owner, first, length, read
        self._needed: dict[tuple[int, int], Rows] = {}

    @cached_property
    def bounds(self) -> list[int]:
        """The index of each ring rank's first segment, and the end."""
        bounds: list[int] = torch.searchsorted(self.owner, torch.arange(self.size + 1)).tolist()
        return bounds

    @cached_property
    def shared(self) -> Tensor:
        """Int32 [owners, readers]: the number of the owner's rows that the reader reads."""
        rows = torch.zeros(self.size, len(self.read), dtype=torch.int32)
        return rows.index_add_(0, self.owner, self.read.T * self.length[:, None].to(torch.int32))

    @cached_property
    def meets(self) -> Tensor:
        """Bool [owners, readers]: whether the reader reads any row of the owner."""
        return self.shared > 0

    @cached_property
    def of_all(self) -> bool:
        """Whether every ring rank reads every row."""
        return bool(self.read.all())

    @property
    def elsewhere(self) -> int:
        """The sum of all remote rows: a lower bound on the rows sent."""
        others = self.read.sum(0) - self.read.gather(0, self.owner[None])[0].long()
        return int((others * self.length).sum())

    def needed(self, owner: int, reader: int) -> Rows:
        """Return the rows of `owner` that `reader` reads. Cached: both use them, more than once."""
        if (owner, reader) not in self._needed:
            segments = slice(self.bounds[owner], self.bounds[owner + 1])
            self._needed[owner, reader] = self.joined(owner, self.read[reader, segments].tolist())
        return self._needed[owner, reader]

    @cached_property
    def _edges(self) -> list[int]:
        """The first row of each segment."""
        edges: list[int] = self.first.tolist()
        return edges

    def joined(self, owner: int, included_segments: list[bool]) -> Rows:
        """Return the rows of some segments of a ring rank, neighbours as one range."""
        ranges: list[range] = []
        begin, base = -1, self.bounds[owner]
        for index, included in enumerate(included_segments, base):
            if included and begin < 0:
                begin = self._edges[index]
            elif not included and begin >= 0:
                ranges.append(range(begin, self._edges[index]))
                begin = -1
        if begin >= 0:
            ranges.append(range(begin, self.rows))
        return tuple(ranges)


def everything(size: int, rows: int) -> Reading:
    """Return the reading in which every ring rank reads every row."""
    ring_size = torch.arange(size)
    read = torch.ones(size, size, dtype=torch.bool)
    return Reading(size, rows, ring_size, torch.zeros_like(ring_size), torch.full_like(ring_size, rows), read)


def reading(layout: Layout, mask: Mask, n: int, placement: Placement, *, of_queries: bool) -> Reading:
    """Return the remote keys, or with `of_queries` the remote queries, of all ring ranks.

    placement: the ranks of each ring rank; their rows are pooled as in `Plan.stretches`.
    """
    size = placement.ring_size
    rows = layout.padded(n, placement.size) // size
    if not mask.terms and n == rows * size:
        return everything(size, rows)
    bands = transposed(mask.bands(n)) if of_queries else mask.bands(n)
    runs = _Runs(layout.run_table(n, placement.size), placement, rows)
    if bool((runs.step == 1).all()):  # with a stride, keys between two keys that are read count as read
        segments = _by_ring_rank(runs, bands, size, rows)
    else:
        segments = _by_stripes(runs, bands, mask.stride, size, rows)
    if segments is None:
        return everything(size, rows)
    owner, first, last, read = segments
    order = (owner * (rows + 1) + first).argsort()
    return Reading(size, rows, owner[order], first[order], (last - first)[order], read[:, order])


class _Runs:
    """The intervals of all ring ranks, sorted by their first position: int64 [intervals] each."""

    def __init__(self, table: Tensor, placement: Placement, rows: int) -> None:
        ring_rank, start, stop, step = placement.ring_rank(table[:, 0]), *table.unbind(1)[1:]
        order = (ring_rank * (int(stop.max()) + 1) + start).argsort()
        ring_rank, start, stop, step = (x[order] for x in (ring_rank, start, stop, step))
        length = -((start - stop) // step)
        offset = length.cumsum(0) - length - ring_rank * rows
        order = start.argsort()
        self.ring_rank, self.start, self.stop = ring_rank[order], start[order], stop[order]
        self.step, self.length, self.offset = step[order], length[order], offset[order]
        """`offset`: the first row of the interval at its ring rank."""


Segments = tuple[Tensor, Tensor, Tensor, Tensor]
"""owner, first, last, read."""


def _by_ring_rank(runs: _Runs, bands: Tensor, size: int, rows: int) -> Segments | None:
    """Return segments for intervals without gaps: under a band, their queries read one range of positions."""
    hits = intersected(_whole(runs.start, runs.stop), bands)
    reader = runs.ring_rank[torch.searchsorted(runs.start, hits[:, 0].contiguous(), right=True) - 1]
    borders = torch.cat([runs.start, runs.stop])
    first, last = hits[:, 2], hits[:, 3]
    edges = torch.cat([borders, first, last]).unique()
    if size * len(edges) > MOST:
        edges = borders.unique()
        if size * len(edges) > MOST:
            return None
        first = edges[torch.searchsorted(edges, first.contiguous(), right=True) - 1]
        last = edges[torch.searchsorted(edges, last.contiguous())]
    run = torch.searchsorted(runs.start, edges[:-1].contiguous(), right=True) - 1
    row = runs.offset[run] + edges[:-1] - runs.start[run]
    first, last = (torch.searchsorted(edges, x.contiguous()) for x in (first, last))
    read = _marked(reader, first, last, size, len(edges) - 1)
    return runs.ring_rank[run], row, row + edges.diff(), read


def _whole(start: Tensor, stop: Tensor) -> Tensor:
    """Return bands of these queries with all keys."""
    zero, open_ = torch.zeros_like(start), torch.full_like(start, UNBOUNDED)
    return torch.stack([start, stop, zero, open_, -open_, open_], 1)


def _by_stripes(runs: _Runs, bands: Tensor, stride: int, size: int, rows: int) -> Segments | None:
    """Return segments for intervals with gaps, one by one."""
    if _too_many(runs, bands):
        return None
    stripes = [(runs.start[:0],) * 3]
    for q, k, (_, _, n0, n1, _, _) in _stripes(runs, bands, stride):
        base = runs.ring_rank[k] * (rows + 1) + runs.offset[k]
        stripes.append((runs.ring_rank[q], base + n0, base + n1))
    reader, first, last = (torch.cat(x) for x in zip(*stripes, strict=True))
    ends = torch.arange(size)[:, None] * (rows + 1) + torch.tensor([0, rows])
    edges = torch.cat([ends.flatten(), first, last]).unique()
    if size * len(edges) > MOST:
        return None
    first, last = (torch.searchsorted(edges, x) for x in (first, last))
    read = _marked(reader, first, last, size, len(edges) - 1)
    begin, stop = edges[:-1], edges[1:]
    inside = begin // (rows + 1) == stop // (rows + 1)
    owner = begin[inside] // (rows + 1)
    return owner, begin[inside] % (rows + 1), stop[inside] % (rows + 1), read[:, inside]


def _too_many(runs: _Runs, bands: Tensor) -> bool:
    pairs = len(runs.start) ** 2
    return pairs * len(bands) > (STRIPES if len(bands) > 1 else 2**8 * STRIPES)


def _stripes(runs: _Runs, bands: Tensor, stride: int) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yield (query interval, key interval, (m0, m1, n0, n1, low, high) in their rows) of attending pairs.

    All intervals of a layout have the same step.
    """
    count, step = len(runs.start), int(runs.step[0])
    none = torch.zeros(count * len(bands), dtype=torch.int64)
    for pair, k in pairs_of_runs(none, none + count):
        q, band = pair // len(bands), bands[pair % len(bands)]
        offset = runs.start[k] - runs.start[q]  # j - i of the first rows
        m0, m1 = _clipped(runs, q, band[:, 0], band[:, 1])
        n0, n1 = _clipped(runs, k, band[:, 2], band[:, 3])
        low = torch.where(band[:, 4] > -UNBOUNDED, -((offset - band[:, 4]) // step), -UNBOUNDED)
        high = torch.where(band[:, 5] < UNBOUNDED, (band[:, 5] - offset) // step, UNBOUNDED)
        m0, m1 = torch.maximum(m0, n0 - high), torch.minimum(m1, n1 - low)
        n0, n1 = torch.maximum(n0, m0 + low), torch.minimum(n1, m1 + high)
        meet = (offset % gcd(step, stride) == 0) & (m0 < m1) & (n0 < n1) & (low <= high)
        yield q[meet], k[meet], tuple(x[meet] for x in (m0, m1, n0, n1, low, high))


def _clipped(runs: _Runs, run: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of intervals at positions [first, last), counted from the interval's start."""
    start, step, length = (x[run] for x in (runs.start, runs.step, runs.length))
    before = -((start - first) // step), -((start - last) // step)
    return before[0].clamp(min=0).minimum(length), before[1].clamp(min=0).minimum(length)


def _marked(reader: Tensor, first: Tensor, last: Tensor, size: int, segments: int) -> Tensor:
    """Return bool [size, segments]: whether a range [first, last) of the reader covers the segment."""
    read = torch.empty(size, segments, dtype=torch.bool)
    block = max(1, 2**22 // (segments + 1))
    order = reader.argsort()
    reader, first, last = reader[order], first[order], last[order]
    for begin in range(0, size, block):
        stop = min(size, begin + block)
        entries = slice(*torch.searchsorted(reader, torch.tensor([begin, stop])).tolist())
        marks = torch.zeros((stop - begin) * (segments + 1), dtype=torch.int32)
        row = (reader[entries] - begin) * (segments + 1)
        ones = torch.ones_like(row, dtype=torch.int32)
        marks.index_add_(0, row + first[entries], ones)
        marks.index_add_(0, row + last[entries], -ones)
        read[begin:stop] = marks.view(stop - begin, -1).cumsum(1, dtype=torch.int32)[:, :-1] > 0
    return read


def pairs_between(layout: Layout, mask: Mask, n: int, ranks: int) -> Tensor:
    """Return the query-key pairs of one rank's queries and another's keys, float64 [ranks, ranks].

    Where counting would take too long (`STRIPES`), every pair of ranks gets the mean: layouts of so many
    intervals are nearly balanced.
    """
    regular = _pairs_by_distance(layout, mask.bands(n), n, ranks) if mask.stride == 1 else None
    if regular is not None:
        return regular
    runs = _Runs(layout.run_table(n, ranks), Placement(ranks), layout.padded(n, ranks) // ranks)
    total = torch.zeros(ranks * ranks, dtype=torch.float64)
    count = _pairs_by_ring_rank if bool((runs.step == 1).all()) else _pairs_of_stripes
    if not count(total, runs, mask.bands(n), mask.stride, ranks):
        total.fill_(float(keys_per_query(mask, n).sum()) / ranks**2)
    return total.view(ranks, ranks)


def _pairs_by_ring_rank(total: Tensor, runs: _Runs, bands: Tensor, stride: int, ranks: int) -> bool:
    """Add the pairs of each residue class of the mask's stride: within a class the mask has no stride."""
    for first in range(stride):
        start, stop = (-((first - x) // stride) for x in (runs.start, runs.stop))
        present = start < stop
        start, stop, rank = start[present], stop[present], runs.ring_rank[present]
        of_class = tightened(of_classes(bands, torch.tensor([first]), stride))
        hits = intersected(_whole(start, stop), of_class)
        q_run = torch.searchsorted(start, hits[:, 0].contiguous(), right=True) - 1
        begin = torch.searchsorted(start, hits[:, 2].contiguous(), right=True) - 1
        end = torch.searchsorted(start, hits[:, 3].contiguous())
        if int((end - begin).sum()) > 2**6 * STRIPES:
            return False
        for i, j in pairs_of_runs(begin, end):
            m0, m1, k0, k1, low, high = hits[i].unbind(1)
            n0, n1 = torch.maximum(k0, start[j]), torch.minimum(k1, stop[j])
            pairs = band_pairs_of(m1 - m0, n1 - n0, low - (n0 - m0), high - (n0 - m0))
            total.index_add_(0, rank[q_run[i]] * ranks + rank[j], pairs.double())
    return True


def _pairs_by_distance(layout: Layout, bands: Tensor, n: int, ranks: int) -> Tensor | None:
    """Count pairs of equal chunks under one band: they depend only on the distance of two chunks."""
    chunks = layout.chunk_table(n, ranks)
    is_one_band = len(bands) == 1 and bands[0, :4].tolist() == [0, n, 0, n]
    if chunks is None or not is_one_band or chunks.shape[1] > 8 or layout.padded(n, ranks) != n:
        return None
    count = chunks.numel()
    offset = torch.arange(1 - count, count) * (n // count)  # j - i of the first rows
    rows = torch.full_like(offset, n // count)
    pairs = band_pairs_of(rows, rows, bands[0, 4] - offset, bands[0, 5] - offset).double()
    total = torch.zeros(ranks, ranks, dtype=torch.float64)
    for q, k in product(chunks.unbind(1), repeat=2):
        total += pairs[k + (count - 1 - q)[:, None]]
    return total


def _pairs_of_stripes(total: Tensor, runs: _Runs, bands: Tensor, stride: int, ranks: int) -> bool:
    if _too_many(runs, bands):
        return False
    step = int(runs.step[0])
    spacing = stride // gcd(step, stride)
    """The distance in rows between consecutive keys of a query."""
    inverse = pow(step // gcd(step, stride), -1, spacing) if spacing > 1 else 0
    for q, k, stripe in _stripes(runs, bands, stride):
        m0, m1, n0, n1, low, high = stripe
        rows, columns = m1 - m0, n1 - n0
        low, high = low - (n0 - m0), high - (n0 - m0)
        to = runs.ring_rank[q] * ranks + runs.ring_rank[k]
        if spacing == 1:
            total.index_add_(0, to, band_pairs_of(rows, columns, low, high).double())
            continue
        offset = (runs.start[q] - runs.start[k]) // gcd(step, stride)
        shift = (offset * inverse - n0 + m0) % spacing
        for first in range(spacing):
            column = (first + shift) % spacing
            pairs = band_pairs_of(
                -((first - rows) // spacing).clamp(max=0),
                -((column - columns) // spacing).clamp(max=0),
                torch.where(low > -UNBOUNDED // 2, -((column - first - low) // spacing), low),
                torch.where(high < UNBOUNDED // 2, (high - column + first) // spacing, high),
            )
            total.index_add_(0, to, pairs.double())
    return True


def begins(residue: Tensor, stride: int, n: int) -> Tensor:
    """Return the number of positions, of n, in the classes before a residue's class."""
    return residue * (n // stride) + residue.clamp(max=n % stride)


def in_classes(bands: Tensor, stride: int, n: int) -> Tensor:
    """Return dilated bands over n positions as bands over positions in the order of classes."""
    blocks = torch.arange(min(stride, n)).split(max(1, BLOCK // max(1, len(bands))))
    return torch.cat([_moved(of_classes(bands, first, stride), first, stride, n) for first in blocks])


def _moved(bands: Tensor, first: Tensor, stride: int, n: int) -> Tensor:
    """Return bands of classes, moved to the start of their class."""
    begin = begins(first, stride, n).repeat_interleave(len(bands) // len(first))[:, None]
    return tightened(torch.cat([bands[:, :4] + begin, bands[:, 4:]], 1))


def numbered(runs: Sequence[tuple[range, int]], stride: int, n: int) -> tuple[Runs, list[range]]:
    """Return intervals of positions in the order of classes, and their rows in the same order.

    runs: positions without gaps, and the row of the first position.
    """
    table = torch.tensor([[run.start, run.stop, row] for run, row in runs])
    start, stop, row = (x[:, None] for x in table.unbind(1))
    first = start + torch.arange(min(stride, int((stop - start).max())))  # [runs, classes]
    some = first < stop
    begin = (begins(first % stride, stride, n) + first // stride)[some]
    end = begin + (-((first - stop) // stride))[some]
    rows = torch.stack([(first - start + row)[some], (stop - start + row).expand_as(first)[some]], 1)
    order = begin.argsort()
    spans = joined_table(torch.zeros_like(begin)[order], begin[order], end[order])
    ranges = [range(low, high, stride) for low, high in rows[order].tolist()]
    return tuple(range(low, high) for _, low, high, _ in spans.tolist()), _joined(ranges)


def _joined(spans: Iterable[range]) -> list[range]:
    """Join neighbours that form one range of some step."""
    ranges: list[range] = []
    for span in spans:
        last = ranges[-1] if ranges else span
        step = span[0] - last[-1]
        if step > 0 and all(len(x) == 1 or x.step == step for x in (last, span)):
            ranges[-1] = range(last[0], span[-1] + 1, step)
        else:
            ranges.append(span)
    return ranges


class Order:
    """The rows of a ring rank in the order of classes, as ranges that do not cross ranges of sent rows.

    rotate: the ranges of rows that are sent; a range of the order lies within one of them.
    """

    def __init__(self, rows: Sequence[range], rotate: Rows) -> None:
        starts = [span.start for span in rotate]
        self.spans = [part for span in rows for part in _parted(span, starts)] if starts[1:] else list(rows)
        self.offsets = list(accumulate(map(len, self.spans), initial=0))

    def rows(self, numbers: Rows) -> Rows:
        """Return the rows with these numbers in the order."""
        return tuple(part for span in numbers for part in self._rows(span))

    def _rows(self, span: range) -> list[range]:
        if span.step < 0:
            return [part[::-1] for part in reversed(self._rows(span[::-1]))]
        first, last = (bisect_right(self.offsets, row) - 1 for row in (span.start, span.stop - 1))
        rows = self.spans[first : last + 1]
        rows[-1] = rows[-1][: span.stop - self.offsets[last]]
        rows[0] = rows[0][span.start - self.offsets[first] :]
        return rows


def _parted(span: range, starts: list[int]) -> list[range]:
    """Cut a range at the starts within it."""
    inner = starts[bisect_right(starts, span[0]) : bisect_right(starts, span[-1])]
    ends = [-((span[0] - start) // span.step) for start in inner]
    return [span[a:b] for a, b in zip([0, *ends], [*ends, len(span)], strict=True) if a < b]
