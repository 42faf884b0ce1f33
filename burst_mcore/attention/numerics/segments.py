"""Segments: ascending ranges of rows, each with the partial results that wait there to be put together.

A part covers some rows; where parts overlap in different rows, the segments are their common refinement. So
each segment is put together in one pass over memory, however many parts it has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from burst_mcore.attention.geometry.rows import gather

KernelResults = tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class ResultsPart:
    """Results for the rows from `start` on."""

    bundle: KernelResults
    start: int

    def covers(self, span: range) -> bool:
        """Return whether these rows are all that the part has."""
        return self.start == span.start and self.bundle[0].shape[1] == len(span)

    def rows(self, span: range) -> KernelResults:
        """Return views of these rows, among those that the part covers."""
        if len(span) == self.bundle[0].shape[1]:
            return self.bundle
        return narrowed(self.bundle, range(span.start - self.start, span.stop - self.start))


@dataclass(slots=True)
class RowSegment:
    """The state of a range of rows."""

    parts: list[ResultsPart] = field(default_factory=list)
    """Results that wait for one pass."""
    summed: bool = False
    """The running sum holds data of these rows."""

    @property
    def empty(self) -> bool:
        """Whether nothing came yet."""
        return not (self.parts or self.summed)


class RowSegments:
    """All rows of a tensor, as segments."""

    def __init__(self, rows: int) -> None:
        self._bounds = [0, rows]
        self._segments = [RowSegment()]

    @property
    def alone(self) -> RowSegment | None:
        """The segment of all rows, if there is no other."""
        return self._segments[0] if len(self._segments) == 1 else None

    def over(self, span: range) -> Iterator[tuple[range, RowSegment]]:
        """Yield the segments of these rows, with their ranges, cut at the span's ends."""
        if not span:
            return
        first, last = self._cut(span.start), self._cut(span.stop)
        for index in range(first, last):
            yield range(self._bounds[index], self._bounds[index + 1]), self._segments[index]

    def sum_up(self, span: range) -> None:
        """Note that the running sum holds all that came of these rows; they become one segment."""
        if span:
            first, last = self._cut(span.start), self._cut(span.stop)
            self._segments[first:last] = [RowSegment(summed=True)]
            self._bounds[first + 1 : last] = []

    def adopt(self, part: ResultsPart) -> None:
        """Note that `part`, which covers all rows, is the running sum now."""
        for segment in self._segments:
            segment.parts.remove(part)
            segment.summed = True

    def _cut(self, row: int) -> int:
        """Return the index of the segment that begins at `row`, after a cut there."""
        index = bisect_left(self._bounds, row)
        if self._bounds[index] != row:
            before = self._segments[index - 1]
            self._bounds.insert(index, row)
            self._segments.insert(index, RowSegment(list(before.parts), before.summed))
        return index


def narrowed(bundle: KernelResults, rows: range) -> KernelResults:
    """Return views of the rows of these tensors."""
    if len(rows) == bundle[0].shape[1 if bundle[0].dim() == 4 else 2]:
        return bundle
    return tuple([gather(x, (rows,)) for x in bundle])
