"""Classes of residues: a dilated mask over a fine layout, as documents of a sequence in another order.

Tokens whose positions leave the same residue by the mask's stride see each other alone. In the order of
these classes, and of positions within a class, a dilated mask is bands. So a layout of many runs is cut like
any other, where a piece for each pair of runs would grow with the square of the runs.

The order is one of global positions, and of a rank's rows: `numbered` counts both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows
from burst_mcore.layout.runs import Runs, joined_table
from burst_mcore.mask.bands import BLOCK, of_classes, tightened


def begins(residue: Tensor, stride: int, n: int) -> Tensor:
    """Return how many of n positions are of the classes before that of a residue."""
    return residue * (n // stride) + residue.clamp(max=n % stride)


def in_classes(bands: Tensor, stride: int, n: int) -> Tensor:
    """Return bands over n positions in the order of classes, which hold every stride-th diagonal alone."""
    blocks = torch.arange(min(stride, n)).split(max(1, BLOCK // max(1, len(bands))))
    return torch.cat([_moved(of_classes(bands, first, stride), first, stride, n) for first in blocks])


def _moved(bands: Tensor, first: Tensor, stride: int, n: int) -> Tensor:
    """Return bands of classes, each from where its class begins."""
    begin = begins(first, stride, n).repeat_interleave(len(bands) // len(first))[:, None]
    return tightened(torch.cat([bands[:, :4] + begin, bands[:, 4:]], 1))


def numbered(runs: Sequence[tuple[range, int]], stride: int, n: int) -> tuple[Runs, list[range]]:
    """Return runs of positions in the order of classes, and the rows that they are, in that order.

    runs: positions without gaps, and the row of the first.
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
    taken = [range(low, high, stride) for low, high in rows[order].tolist()]
    return tuple(range(low, high) for _, low, high, _ in spans.tolist()), _joined(taken)


def _joined(spans: Iterable[range]) -> list[range]:
    """Join neighbours that are one range of some step."""
    joined: list[range] = []
    for span in spans:
        last = joined[-1] if joined else span
        step = span[0] - last[-1]
        if step > 0 and all(len(x) == 1 or x.step == step for x in (last, span)):
            joined[-1] = range(last[0], span[-1] + 1, step)
        else:
            joined.append(span)
    return joined


class Order:
    """The rows of a position in the order of classes, in ranges between whose ends all rows travel.

    Args:
        rows: as `numbered` returns them.
        travel: the ranges of rows that travel; a range of the order lies within one of them.
    """

    def __init__(self, rows: Sequence[range], travel: Rows) -> None:
        starts = [span.start for span in travel]
        self.spans = [part for span in rows for part in _parted(span, starts)] if starts[1:] else list(rows)
        self.offsets = list(accumulate(map(len, self.spans), initial=0))

    def rows(self, numbers: Rows) -> Rows:
        """Return the rows that are these by number, in their order."""
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
