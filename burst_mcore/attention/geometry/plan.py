"""Plans: the pieces in which the queries of one position meet the keys of another, from layout and mask.

A mask is bands over global positions. Rows are stored in ascending order of position, so a band is a
rectangle of local rows, too. Its diagonals are straight wherever both sides are one run, and arithmetic gives
the piece. Elsewhere the rectangle is cut until its parts are full, empty or straight. The diagonals of a
dilated mask are straight between two runs alone; where a layout has many, rows are counted in `classes`.

No layout is a special case. Causal zigzag on G ranks, chunk pairs (r, 2G-1-r), comes out as one piece for
every pair of ranks. At home it is causal over both chunks. Lower ranks give all queries x the first chunk's
keys, higher ranks the second chunk's queries x all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from itertools import accumulate
from math import gcd
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from burst_mcore.attention.geometry.classes import Order, in_classes, numbered
from burst_mcore.attention.geometry.piece import Piece
from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.geometry.reading import Reading, reading
from burst_mcore.attention.geometry.rows import Rows, union
from burst_mcore.layout import Layout, joined
from burst_mcore.mask import Mask
from burst_mcore.mask.bands import UNBOUNDED, tight, tightened

Runs = tuple[range, ...]
T = TypeVar("T")
Arguments = ParamSpec("Arguments")
FEW = 8
"""Runs of a position, at most, of which each meets each as a piece with a step, where a mask is dilated."""


@dataclass(frozen=True)
class Stretch:
    """Rows of a position in ascending global position: runs of one step, from local row `start` on."""

    runs: Runs
    start: int

    @cached_property
    def offsets(self) -> list[int]:
        """The local row at which each run begins, and the end."""
        return list(accumulate(map(len, self.runs), initial=self.start))

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """The position at which each run begins, and `offsets`."""
        return torch.tensor([run.start for run in self.runs]), torch.tensor(self.offsets)

    def rows_before_each(self, position: Tensor) -> Tensor:
        """Return how far the local rows reach that lie before each of many global positions."""
        (first, offsets), step = self._tables, self.runs[0].step
        known = (torch.searchsorted(first, position.contiguous()) - 1).clamp(min=0)
        within = (position - first[known] + step - 1) // step
        return torch.minimum(offsets[known] + within.clamp(min=0), offsets[known + 1])

    def positions(self, row: Tensor) -> Tensor:
        """Return the global positions of local rows."""
        (first, offsets), step = self._tables, self.runs[0].step
        index = torch.searchsorted(offsets, row.contiguous(), right=True) - 1
        return first[index] + (row - offsets[index]) * step

    def cut(self, first: Tensor, stop: Tensor) -> Tensor:
        """Return where a run begins within each of some ranges of rows, nearest to the middle; else -1."""
        _, offsets = self._tables
        begin = torch.searchsorted(offsets, first.contiguous(), right=True)
        end = torch.searchsorted(offsets, stop.contiguous())
        after = torch.searchsorted(offsets, (first + stop + 1) // 2).clamp(max=len(offsets) - 1)
        before = torch.maximum(after - 1, begin).clamp(max=len(offsets) - 1)
        after = torch.minimum(after, end - 1)
        far = (2 * offsets[before] - first - stop).abs() > (2 * offsets[after] - first - stop).abs()
        return torch.where(begin < end, offsets[torch.where(far, after, before)], -1)


def cached_on_plan(
    function: Callable[Concatenate[Plan, Arguments], T],
) -> Callable[Concatenate[Plan, Arguments], T]:
    """Cache the results of a function of a plan, its first argument, for as long as the plan lives."""

    @wraps(function)
    def found(plan: Plan, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
        key = function, args, tuple(kwargs.items())
        if key not in plan.cache:
            plan.cache[key] = function(plan, *args, **kwargs)
        result: T = plan.cache[key]
        return result

    return found


class Plan:
    """The pieces of a layout and a mask on a ring, each position of which has the rows of a head group.

    Pieces are computed when they are first asked for, and cached. Plans are cached by value: `plan_of`.
    """

    def __init__(self, layout: Layout, mask: Mask, n: int, placement: Placement) -> None:
        self.layout, self.mask, self.n, self.placement = layout, mask, n, placement
        self.size, self.heads = placement.positions, placement.heads
        self.rows = layout.padded(n, placement.size) // self.size
        """Local rows of a position."""
        self.bands = mask.bands(n)
        self.by_class = mask.stride > 1 and self._fine()
        """Whether pieces count rows in the order of classes (`geometry.classes`)."""
        if self.by_class:
            self.bands = in_classes(self.bands, mask.stride, self.rows * self.size)
        self.cache: dict[tuple[Any, ...], Any] = {}
        """Results that follow from the plan: see `cached_on_plan`."""

    def _fine(self) -> bool:
        """Return whether the runs of a position are many, and without gaps."""
        table = self.layout.run_table(self.n, self.placement.size)
        return len(table) > FEW * self.size and bool((table[:, 3] == 1).all())

    def runs(self, position: int, member: int) -> Runs:
        """Return the global positions that a rank holds."""
        return self.layout.runs(self.n, self.placement.rank(position, member), self.placement.size)

    @cached_on_plan
    def stretches(self, position: int, part: int | None = None) -> tuple[Stretch, ...]:
        """Return the rows of a position, or of one member of its head group (each of its runs).

        The members' rows are pooled: in ascending order where runs are without gaps, else run after run.
        """
        runs = sorted(
            (run for member in range(self.heads) for run in self.runs(position, member)),
            key=lambda run: run.start,
        )
        starts = list(accumulate(map(len, runs), initial=0))
        if part is not None:
            own = set(self.runs(position, part))
            return tuple(
                Stretch((run,), start) for run, start in zip(runs, starts, strict=False) if run in own
            )
        straight = self.mask.stride > 1 and not self.by_class
        if straight or any(run.step > 1 for run in runs):
            return tuple(Stretch((run,), start) for run, start in zip(runs, starts, strict=False))
        return (Stretch(joined(runs), 0),)

    def member_rows(self, position: int, member: int) -> Rows:
        """Return the places of a member's rows among its position's, in the order of its own rows."""
        ends = self.stretches(position, member)
        return tuple(range(stretch.start, stretch.start + len(stretch.runs[0])) for stretch in ends)

    def head(self, cut: int) -> Plan:
        """Return the plan of the queries before global position `cut` alone; the others meet nothing."""
        if cut >= self.n:
            return self
        key = "head", cut
        if key not in self.cache:
            mask = self.mask & head_mask(cut, self.n)
            self.cache[key] = plan_of(self.layout, mask, self.n, self.placement)
        head: Plan = self.cache[key]
        return head

    @cached_on_plan
    def rows_from(self, position: int, cut: int) -> Rows:
        """Return the rows of a position from global position `cut` on."""
        stretches, cuts = self.stretches(position, None), torch.tensor([cut])
        return union([range(int(x.rows_before_each(cuts)), x.offsets[-1]) for x in stretches])

    @cached_on_plan
    def pieces(
        self, q_at: int, k_at: int, *, q_part: int | None = None, k_part: int | None = None
    ) -> list[Piece]:
        """Return the disjoint pieces in which queries of a position, or a member, meet keys of another.

        Where the plan is `by_class`, pieces count rows as its `order` does.
        """
        if not self.reading(of_queries=False).meets[k_at, q_at]:
            return []
        return [
            piece
            for q in self._counted(q_at, q_part)
            for k in self._counted(k_at, k_part)
            for piece in self._meet(q, k)
        ]

    def _counted(self, position: int, part: int | None) -> tuple[Stretch, ...]:
        """Return the stretches whose rows pieces count."""
        return (self._classes(position, part)[0],) if self.by_class else self.stretches(position, part)

    @cached_on_plan
    def _classes(self, position: int, part: int | None) -> tuple[Stretch, list[range]]:
        """Return the rows of a position, or of a member, in the order of classes, and which they are."""
        stretches = self.stretches(position, part)
        own = [pair for x in stretches for pair in zip(x.runs, x.offsets, strict=False)]
        runs, rows = numbered(own, self.mask.stride, self.rows * self.size)
        return Stretch(runs, 0), rows

    @cached_on_plan
    def order(self, position: int, part: int | None, travel: Rows) -> Order:
        """Return which rows those are that pieces count `by_class`; travel: as `Order` takes them."""
        return Order(self._classes(position, part)[1], travel)

    @cached_on_plan
    def reading(self, *, of_queries: bool) -> Reading:
        """Return who reads which keys, or which queries, of all positions."""
        return reading(self.layout, self.mask, self.n, self.placement, of_queries=of_queries)

    def needed(self, owner: int, reader: int, *, of_queries: bool) -> Rows:
        """Return the rows of `owner` that `reader` reads: its keys, or its queries."""
        return self.reading(of_queries=of_queries).needed(owner, reader)

    @property
    def everything(self) -> bool:
        """Whether every position reads all of every other."""
        return not self.mask.terms and self.n == self.rows * self.size

    @cached_on_plan
    def _table(self, stretch: Stretch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all bands in local rows: first and last query rows, first and last key rows."""
        q0, q1, k0, k1 = map(stretch.rows_before_each, self.bands[:, :4].T.contiguous())
        return q0, q1, k0, k1

    def _meet(self, q: Stretch, k: Stretch) -> list[Piece]:
        shift, step = 0, 1 if self.by_class else self.mask.stride
        if step > 1:  # both are one run
            q_run, k_run = q.runs[0], k.runs[0]
            apart, common = q_run.start - k_run.start, gcd(q_run.step, step)
            if apart % common:
                return []
            step //= common
            shift = apart // common * pow(q_run.step // common, -1, step) % step if step > 1 else 0
        (m0, m1, _, _), (_, _, n0, n1) = self._table(q), self._table(k)
        meeting = ((m0 < m1) & (n0 < n1)).nonzero().flatten()
        if not len(meeting):
            return []
        local = torch.stack([m0[meeting], m1[meeting], n0[meeting], n1[meeting]], 1)
        limits = self.bands[meeting, 4:]
        if len(q.runs) == len(k.runs) == 1:
            return _straight(local, limits, q, k, step, shift)
        return _pieces(q, k, torch.cat([local, limits], 1), square=self.by_class)


PLANS = 64
"""Plans in the cache, of the masks, layouts and lengths used last. A batch needs one for each of its rows and
kinds of layers, and the next batch, which is planned meanwhile, as many again."""


def plan_for(layout: Layout, mask: Mask, n: int, size: int, heads: int = 1) -> Plan:
    """Return the plan of a mask over n tokens, dealt over `size` positions of `heads` neighbours. Cached.

    Raises:
        ValueError: as `plan_of`.
    """
    return plan_of(layout, mask, n, Placement(size, heads))


@lru_cache(maxsize=PLANS)
def plan_of(layout: Layout, mask: Mask, n: int, placement: Placement) -> Plan:
    """Return the plan of a mask over n tokens, dealt over the ranks of a placement. Cached.

    Raises:
        ValueError: the mask does not go with n tokens, or the layout not with so many ranks.
    """
    return Plan(layout, mask, n, placement)


def head_mask(cut: int, n: int) -> Mask:
    """Return the mask under which only queries before position `cut` of n see any key."""
    return Mask.ranges([[0, cut]], [[0, n]]) if cut else Mask.ranges([], [])


def _straight(local: Tensor, limits: Tensor, q: Stretch, k: Stretch, step: int, shift: int) -> list[Piece]:
    """Return pieces where each side is one run: n - m is j - i, divided by the step of the runs."""
    (q_run,), (k_run,) = q.runs, k.runs
    apart = (k_run.start - q_run.start) - q_run.step * (k.start - q.start)  # j - i where n = m
    low, high = limits.unbind(1)
    low = torch.where(low > -UNBOUNDED, -((apart - low) // q_run.step), low)
    high = torch.where(high < UNBOUNDED, (high - apart) // q_run.step, high)
    rows = tightened(torch.cat([local, low[:, None], high[:, None]], 1)).tolist()
    pieces = [_from_corner(*row) for row in rows]
    if step == 1:
        return pieces
    return [p._replace(step=step, shift=(shift - (p.n0 - k.start) + (p.m0 - q.start)) % step) for p in pieces]


def _from_corner(m0: int, m1: int, n0: int, n1: int, low: int, high: int) -> Piece:
    """Return the piece, from diagonals that count from row 0 and column 0."""
    apart = n0 - m0
    low = low if low == -UNBOUNDED else low - apart
    return Piece(m0, m1, n0, n1, low, high if high == UNBOUNDED else high - apart)


def _pieces(q: Stretch, k: Stretch, bands: Tensor, *, square: bool) -> list[Piece]:
    """Return the pieces of bands: rectangles of local rows, with diagonals over global positions.

    square: as in `_cut`.
    """
    of_band: dict[int, list[Piece]] = {}
    causal = (bands[:, 4] == -UNBOUNDED) & (bands[:, 5] == 0) & (q is k)  # order of rows is that of positions
    bounds = bands[causal, :4].tolist()
    for band, (a, b, c, d) in zip(causal.nonzero().flatten().tolist(), bounds, strict=True):
        m0, n1 = max(a, c), min(b, d)
        if m0 < b and c < n1:
            high = UNBOUNDED if n1 - 1 <= m0 else m0 - c
            of_band[band] = [Piece(m0, b, c, n1, -UNBOUNDED, high)]
    rectangles = torch.cat([bands, torch.arange(len(bands))[:, None]], 1)[~causal]
    while len(rectangles):
        done, rectangles = _cut(q, k, rectangles, square=square)
        for *rows, band in done:
            of_band.setdefault(band, []).append(_from_corner(*rows))
    return [piece for _, pieces in sorted(of_band.items()) for piece in _merged(pieces)]


def _cut(q: Stretch, k: Stretch, rectangles: Tensor, *, square: bool) -> tuple[list[list[int]], Tensor]:
    """Cut rectangles until they are full, empty or straight: return those that are, and halves of others.

    Args:
        rectangles: [many, 7]: the columns of bands over rows, and a number that parts keep.
        square: cut the longer side, not queries first. The pieces under a diagonal are as many then, but have
            n log n rows together, not n * n: it counts where rows lie apart.
    """
    m0, m1, n0, n1, low, high, band = rectangles.unbind(1)
    for _ in range(2):  # columns, rows, and columns again for the rows that are left
        first, last = q.positions(m0), q.positions(m1 - 1)
        n0 = torch.maximum(n0, k.rows_before_each(first + low))
        n1 = torch.minimum(n1, k.rows_before_each(last + high + 1))
        some = n0 < n1
        m0, m1, n0, n1, low, high, band = (x[some] for x in (m0, m1, n0, n1, low, high, band))
        left, right = k.positions(n0), k.positions(n1 - 1)
        m0 = torch.maximum(m0, q.rows_before_each(left - high))
        m1 = torch.minimum(m1, q.rows_before_each(right - low + 1))
        some = m0 < m1
        m0, m1, n0, n1, low, high, band, left, right = (
            x[some] for x in (m0, m1, n0, n1, low, high, band, left, right)
        )
    first, last = q.positions(m0), q.positions(m1 - 1)
    open_low, open_high = low <= left - last, right - first <= high
    row, column = q.cut(m0, m1), k.cut(n0, n1)
    by_row = (row >= 0) & ((column < 0) | (m1 - m0 >= n1 - n0 if square else row >= 0))
    whole = (open_low & open_high) | (~by_row & (column < 0))
    apart = (n0 - m0) - (left - first)  # of diagonals that count rows
    lowest = torch.where(open_low, -UNBOUNDED, low + apart)
    highest = torch.where(open_high, UNBOUNDED, high + apart)
    rows = tight(torch.stack([m0, m1, n0, n1, lowest, highest], 1))  # rows that no pair needs do not travel
    done = torch.cat([rows, band[:, None]], 1)[whole].tolist()
    upper = m0, torch.where(by_row, row, m1), n0, torch.where(by_row, n1, column), low, high, band
    lower = torch.where(by_row, row, m0), m1, torch.where(by_row, n0, column), n1, low, high, band
    return done, torch.cat([torch.stack(half, 1)[~whole] for half in (upper, lower)])


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Join neighbouring full pieces: first those below each other, then those beside each other."""
    for low, high, across in ((0, 1, 2), (2, 3, 0)):
        merged: list[Piece] = []
        for piece in sorted(pieces, key=lambda p: (p[across], p[across + 1], p[low])):
            last = merged[-1] if merged else None
            if (
                last is not None
                and last.full
                and piece.full
                and last[across : across + 2] == piece[across : across + 2]
                and last[high] == piece[low]
            ):
                merged[-1] = last._replace(**{Piece._fields[high]: piece[high]})
            else:
                merged.append(piece)
        pieces = merged
    return pieces
