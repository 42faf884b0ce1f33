"""Sums over the tiles of a pass: the online softmax of partial outputs, and gradients.

Partial results are kept until several can be merged in one pass over memory, or until the sum is read.
Where a single tile covers all rows (one rank, or a ring with a single step), nothing is copied.
Letters: B batch, S rows, H heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, count, gather, relative_to, shares, strided
from burst_mcore.attention.numerics.rowwise import add_up, combine
from burst_mcore.dtypes import of_parts

WAITING = 8
"""The maximum number of pending partial results of a row."""
KernelResults = tuple[Tensor, ...]
GradientShare = KernelResults | Callable[..., None]
"""A tile's gradients: tensors, or a deferred kernel call that accumulates into given buffers."""


class Block(NamedTuple):
    """A Q block or KV block in a buffer, with the sums of its gradients."""

    rows: Rows | None
    """The rows of the owner in the buffer; None: all."""
    tensors: KernelResults
    """K and V of these rows, or (q, dO, D, LSE)."""
    sums: GradientSums | PendingGradients | None = None
    """In backward."""
    out: Tensor | None = None
    """The output of queries in backward, or a stand-in for O; None where both are missing."""

    def take(self, rows: Rows, share: GradientShare) -> None:
        """Add a tile's gradients of these rows to the sums."""
        assert self.sums is not None
        self.sums.take(rows, share)


class KeyBlocks:
    """K and V of the received blocks of a pass, unchanged; `LatentBlocks` expands them from latents."""

    def block(self, owner: int, received: Block, read: Callable[[], Rows]) -> Block:
        """Return K and V of a received block, with the sums of their gradients: the same until `close`.

        read: returns the rows that tiles will read.
        """
        return received

    def settle(self, owner: int, span: range) -> None:
        """Add the gradients of some rows to the sums of `received`, a block of all rows of the owner."""

    def close(self, owner: int) -> None:
        """Release a block after its last tile; its gradients are added to the sums of `received`, if any."""


class _Sum(ABC):
    """A running sum of partial results, each for some of the rows."""

    _blank: tuple[float, ...]
    """The values of rows without any partial result, by tensor."""

    waiting_bytes = 2**30
    """The maximum bytes of pending parts in one sum. Long shards keep fewer parts: there a pass over memory
    is short relative to the kernels, and memory is scarce."""

    def __init__(self, like: Tensor) -> None:
        self._like, self.dtype = like, torch.promote_types(like.dtype, torch.float32)
        rows = like.shape[1]
        self._segments = RowSegments(rows)
        self._all = range(rows)
        self._total: KernelResults | None = None
        self._limit = min(WAITING, self.waiting_bytes // max(1, like.numel() * like.itemsize))

    @abstractmethod
    def room(self, dtype: torch.dtype) -> KernelResults:
        """Return uninitialised tensors for all rows, results in `dtype`."""

    _combine: Callable[..., None]
    """Merges parts of the same rows: (parts, *into), where `into` may be the first part."""

    def add(self, rows: Rows, part: KernelResults) -> None:
        """Add a tile's results of these rows; the sum owns the tensors from then on."""
        if len(rows) == 1 and rows[0].step == 1:
            self._add_span(rows[0], part)
            return
        for of_span in zip(*(shares(rows, x) for x in part), strict=True):
            span, share = of_span[0][0], tuple(x for _, x in of_span)
            if span.step == 1:
                self._add_span(span, share)
            else:
                self._add_spread(span, share)

    def _add_span(self, span: range, share: KernelResults) -> None:
        """Keep results of neighbouring rows pending, and merge segments with more parts than the limit."""
        segments, part = list(self._segments.over(span)), ResultsPart(share, span.start)
        for _, segment in segments:
            segment.parts.append(part)
        are_few = 4 * len(span) < len(self._all)
        limit = max(self._limit, 1 if are_few else 0)
        full = [(piece, s) for piece, s in segments if len(s.parts) > (limit or (0 if s.summed else 1))]
        if full and limit == 0:  # a large part is added at once and released, even if it is the only part
            self._settled(self._all)
        else:
            for piece, segment in full:
                self._settle(piece, segment)

    def _add_spread(self, span: range, share: KernelResults) -> None:
        """Add results of rows with gaps between them, at once."""
        total = self._settled(range(span.start, span[-1] + 1))
        to = tuple(strided(x, range(0, span[-1] + 1 - span.start, span.step)) for x in total)
        self._combine([to, share], *to)

    def running(self, rows: Rows) -> tuple[KernelResults, bool] | None:
        """Return the sum of these rows for in-place additions, and whether it is uninitialised.

        None if a copy would be needed.
        """
        if len(rows) != 1 or rows[0].step != 1:
            return None
        if self._limit == 0 and any([segment.parts for _, segment in self._segments.over(self._all)]):
            self._settled(self._all)  # a large pending part is released before a kernel allocates others
        fresh = not any([segment.parts or segment.summed for _, segment in self._segments.over(rows[0])])
        if fresh:  # all rows will be set before any is read
            self._segments.sum_up(rows[0])
            return narrowed(self._room(), rows[0]), True
        return self._settled(rows[0]), False

    def put(self, span: range, into: KernelResults) -> None:
        """Write the sum of these rows, so far, into tensors of any dtypes."""
        for piece, segment in self._segments.over(span):
            to = narrowed(into, piece, span.start)
            parts = self._parts(piece, segment)
            if parts:
                self._combine(parts, *to)
            else:
                self._fill(to)

    def complete(self) -> KernelResults:
        """Return the sum of all rows; it may be in the dtype of its only part."""
        segments = [segment for _, segment in self._segments.over(self._all)]
        single = segments[0] if len(segments) == 1 else None
        if self._total is None and single and len(single.parts) == 1 and single.parts[0].covers(self._all):
            return single.parts[0].results
        if self._like.dtype == self.dtype or (single and single.summed and not single.parts):
            return self._settled(self._all)
        results = self.room(self._like.dtype)
        self.put(self._all, results)
        return results

    def _parts(self, piece: range, segment: RowSegment) -> list[KernelResults]:
        parts = [narrowed(part.results, piece, part.start) for part in segment.parts]
        if segment.summed:
            assert self._total is not None
            parts.insert(0, narrowed(self._total, piece))
        return parts

    def _settled(self, span: range) -> KernelResults:
        """Return the running sum of these rows, with all pending parts merged."""
        total = self._room()
        for piece, segment in list(self._segments.over(span)):
            self._settle(piece, segment)
        self._segments.sum_up(span)
        return narrowed(total, span)

    def _settle(self, piece: range, segment: RowSegment) -> None:
        """Merge the parts of a segment into the running sum."""
        to = narrowed(self._room(), piece)
        if segment.parts:
            parts = [narrowed(part.results, piece, part.start) for part in segment.parts]
            self._combine([to, *parts] if segment.summed else parts, *to)
        elif not segment.summed:
            self._fill(to)
        segment.parts, segment.summed = [], True

    def _room(self) -> KernelResults:
        """Return the running sum: at first the memory of a part with all rows and the dtype, else new."""
        if self._total is None:
            _, first = next(self._segments.over(self._all), (range(0), RowSegment()))
            for part in first.parts:
                if part.covers(self._all) and part.results[0].dtype == self.dtype:
                    self._total = part.results
                    self._segments.adopt(part)
                    return self._total
            self._total = self.room(self.dtype)
        return self._total

    def _fill(self, to: KernelResults) -> None:
        for x, value in zip(to, self._blank, strict=True):
            x.fill_(value)


class OnlineSoftmax(_Sum):
    """The running (out, lse) of one rank's queries over the tiles so far.

    sinks [H]: scores with values of zero: at first lse = sink and out = 0.
    """

    _blank = 0.0, -torch.inf
    _combine = staticmethod(combine)

    def __init__(self, q: Tensor, value_dim: int, sinks: Tensor | None = None) -> None:
        super().__init__(q)
        self._value_dim, self._of_lse = value_dim, of_parts(q.dtype)
        if sinks is not None:
            out, lse = self._total = self.room(self.dtype)
            out.zero_()
            lse.copy_(sinks[:, None])
            self._segments.sum_up(self._all)

    def add(self, rows: Rows, part: KernelResults) -> None:
        """Merge a tile's (out [B, M, H, D], lse [B, H, M]) of these M rows; the sum owns both afterwards."""
        out, lse = part
        super().add(rows, (out, lse.to(self._of_lse)))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out [B, S, H, D] in the queries' dtype, lse [B, H, S] in at least float32)."""
        out, lse = self.complete()
        return out.to(self._like.dtype), lse.to(self.dtype)

    def lse(self) -> Tensor:
        """Return lse [B, H, S] alone, after `put` has written the outputs."""
        result = self.room_for_lse(self._all)
        for piece, segment in self._segments.over(self._all):
            parts = [lse for _, lse in self._parts(piece, segment)]
            to = narrowed((result,), piece)[0]
            to.fill_(-torch.inf)
            for part in parts:
                torch.logaddexp(to, part, out=to)
        return result.to(self.dtype)

    def room(self, dtype: torch.dtype) -> KernelResults:
        """Return uninitialised out [B, S, H, D] in `dtype`, and lse [B, H, S] in the dtype of parts."""
        out = self._like.new_empty((*self._like.shape[:3], self._value_dim), dtype=dtype)
        return out, self.room_for_lse(self._all)

    def room_for_lse(self, rows: range) -> Tensor:
        """Return an uninitialised lse of these rows, in the dtype of partial results."""
        batch, _, heads, _ = self._like.shape
        return self._like.new_empty((batch, heads, len(rows)), dtype=self._of_lse)


class GradientSum(_Sum):
    """The running gradient of a tensor, in at least float32."""

    _blank = (0.0,)
    waiting_bytes = 2**25
    """Less than in forward: in backward memory is scarcest, and kernels take three times as long."""

    @classmethod
    def into(cls, total: Tensor, *, fresh: bool) -> Self:
        """Return the sum over the memory of `total`, in its dtype; `fresh`: `total` is uninitialised."""
        gradient_sum = cls(total)
        gradient_sum._total, gradient_sum.dtype = (total,), total.dtype
        if not fresh:
            gradient_sum._segments.sum_up(gradient_sum._all)
        return gradient_sum

    def result(self) -> Tensor:
        """Return the sum, in the dtype of `like`; zeros where nothing was added."""
        return self.complete()[0].to(self._like.dtype)

    def room(self, dtype: torch.dtype, rows: int | None = None) -> KernelResults:
        """Return an uninitialised tensor for a number of rows; None: all."""
        batch, every, *rest = self._like.shape
        return (self._like.new_empty((batch, every if rows is None else rows, *rest), dtype=dtype),)

    def _combine(self, parts: Sequence[KernelResults], total: Tensor) -> None:
        add_up([part for (part,) in parts], total)


class GradientSums:
    """The running gradients of the tensors of a block.

    stored: the owner's rows in the tensors; None: all.
    """

    def __init__(self, like: KernelResults, stored: Rows | None = None) -> None:
        self._sums, self._stored = tuple([GradientSum(like=x) for x in like]), stored

    @classmethod
    def into(cls, totals: KernelResults, stored: Rows | None, *, fresh: bool) -> Self:
        """Return the sums over the memory of `totals`: see `GradientSum.into`."""
        sums = cls((), stored)
        sums._sums = tuple([GradientSum.into(total, fresh=fresh) for total in totals])
        return sums

    def take(self, rows: Rows, share: GradientShare) -> None:
        """Add gradients of these rows of the owner; the sums own the tensors from then on."""
        places = relative_to(self._stored, rows)
        if callable(share):
            running = [pair for total in self._sums if (pair := total.running(places))]
            if running:
                share(*(total for (total,), _ in running), fresh=all(fresh for _, fresh in running))
                return
            by_kernel = share
            share = tuple([total.room(total.dtype, count(places))[0] for total in self._sums])
            by_kernel(*share, fresh=True)
        for total, gradient in zip(self._sums, share, strict=True):
            total.add(places, (gradient,))

    def put(self, span: range, into: KernelResults) -> None:
        """Write the sums of these rows of the tensors, so far, into tensors of any dtypes."""
        for total, to in zip(self._sums, into, strict=True):
            total.put(span, (to,))

    def finish(self, results: KernelResults | None) -> None:
        """Merge all pending parts into the running sums, or into `results`, of any dtype."""
        for total, result in zip(self._sums, results or (None,) * len(self._sums), strict=True):
            if result is None:
                total.complete()
            else:
                total.put(total._all, (result,))

    def results(self) -> KernelResults:
        """Return the sums in the dtypes of the tensors, and release them; zeros where nothing was added."""
        sums, self._sums = list(self._sums), ()
        return tuple([sums.pop(0).result() for _ in range(len(sums))])

    def room(self, dtype: torch.dtype, rows: int) -> KernelResults:
        """Return uninitialised tensors for a number of rows."""
        return tuple([total.room(dtype, rows)[0] for total in self._sums])


class PendingGradients:
    """The gradients of a rotating block from the last compute, while the block's sums are in flight."""

    def __init__(self) -> None:
        self._shares: list[tuple[Rows, GradientShare]] = []

    def take(self, rows: Rows, share: GradientShare) -> None:
        self._shares.append((rows, share))

    def add_to(self, sums: GradientSums) -> None:
        """Add all gradients to the sums, and release them."""
        shares, self._shares = self._shares, []
        for rows, share in shares:
            sums.take(rows, share)


@dataclass(slots=True, eq=False)
class ResultsPart:
    """Results for the rows from `start` on."""

    results: KernelResults
    start: int

    def covers(self, span: range) -> bool:
        """Return whether the part has exactly these rows."""
        return self.start == span.start and self.results[0].shape[1] == len(span)


@dataclass(slots=True)
class RowSegment:
    """The state of a range of rows."""

    parts: list[ResultsPart] = field(default_factory=list)
    """Pending results."""
    summed: bool = False
    """Whether the running sum is initialised for these rows."""


class RowSegments:
    """The segments of all rows of a tensor."""

    def __init__(self, rows: int) -> None:
        self._bounds = [0, rows]
        self._segments = [RowSegment()]

    def over(self, span: range) -> Iterator[tuple[range, RowSegment]]:
        """Yield the segments of these rows, with their ranges, cut at the span's ends."""
        if not span:
            return
        first, last = self._cut(span.start), self._cut(span.stop)
        for index in range(first, last):
            yield range(self._bounds[index], self._bounds[index + 1]), self._segments[index]

    def sum_up(self, span: range) -> None:
        """Note that the running sum has all parts of these rows: one segment without pending parts."""
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
        """Return the index of the segment that begins at `row`, after a split there."""
        index = bisect_left(self._bounds, row)
        if self._bounds[index] != row:
            before = self._segments[index - 1]
            self._bounds.insert(index, row)
            self._segments.insert(index, RowSegment(list(before.parts), before.summed))
        return index


def narrowed(tensors: KernelResults, rows: range, first: int = 0) -> KernelResults:
    """Return views of the rows of these tensors, which hold rows from `first` on."""
    if len(rows) == tensors[0].shape[1 if tensors[0].dim() == 4 else 2]:
        return tensors
    places = (range(rows.start - first, rows.stop - first),)
    return tuple([gather(x, places) for x in tensors])
