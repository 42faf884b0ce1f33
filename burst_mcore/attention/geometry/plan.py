"""Plans: the pieces of each pair of ring ranks' queries and keys, from a layout and a mask.

A mask is bands over global positions. Rows are stored in ascending order of position, so a band is a
rectangle of local rows, too. Where both sides are one interval of positions, its diagonals are straight, and
arithmetic gives the piece. Elsewhere the rectangle is cut until its parts are full, empty or straight. Under
a dilated mask only two intervals have straight diagonals; with many intervals, rows are counted by residue
classes.

No layout is a special case. Causal zigzag on G ranks, chunk pairs (r, 2G-1-r) (the paper's equation 11), is
one piece for every pair of ranks (equation 12). On one rank it is causal over both chunks. With keys of lower
ranks it is all queries x the first chunk's keys, of higher ranks the second chunk's queries x all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from itertools import accumulate, product
from math import gcd
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from burst_mcore.attention.geometry.pattern import NO_PIECES
from burst_mcore.attention.geometry.reading import Order, Reading, in_classes, numbered, reading
from burst_mcore.attention.geometry.rows import Rows, union
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.layout import Layout
from burst_mcore.layout.kinds import Runs, joined_table
from burst_mcore.mask import Mask
from burst_mcore.mask.bands import UNBOUNDED, has_pairs, tight, tightened, transposed

T = TypeVar("T")
Arguments = ParamSpec("Arguments")
FEW = 8
"""The maximum intervals of a ring rank with a piece for each pair of intervals under a dilated mask."""


@dataclass(frozen=True, eq=False)  # compared by identity: runs may be thousands
class Stretch:
    """Rows of a ring rank in ascending global position: intervals of one step."""

    first: Tensor
    """The first position of each interval."""
    offsets: Tensor
    """The first local row of each interval, and the end."""
    step: int = 1

    @classmethod
    def of(cls, run: range, start: int) -> Stretch:
        """Return the rows of one interval, from local row `start` on."""
        return cls(torch.tensor([run.start]), torch.tensor([start, start + len(run)]), run.step)

    @cached_property
    def rows(self) -> range:
        return range(int(self.offsets[0]), int(self.offsets[-1]))

    def rows_before_each(self, position: Tensor) -> Tensor:
        """Return the end of the local rows before each of many global positions."""
        index = (torch.searchsorted(self.first, position.contiguous()) - 1).clamp(min=0)
        steps = (position - self.first[index] + self.step - 1).clamp(min=0)
        steps = steps // self.step if self.step > 1 else steps
        return torch.minimum(self.offsets[index] + steps, self.offsets[index + 1])

    def positions(self, row: Tensor) -> Tensor:
        index = torch.searchsorted(self.offsets[:-1], row.contiguous(), right=True) - 1
        return self.first[index] + (row - self.offsets[index]) * self.step

    def cut(self, first: Tensor, stop: Tensor) -> Tensor:
        """Return the start of an interval within each range of rows, nearest to its middle; else -1."""
        offsets = self.offsets
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
    """Cache the results of a function of a plan, its first argument, on the plan."""

    @wraps(function)
    def found(plan: Plan, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
        key = function, args, tuple(kwargs.items())
        if key not in plan.cache:
            plan.cache[key] = function(plan, *args, **kwargs)
        result: T = plan.cache[key]
        return result

    return found


class Plan:
    """The pieces of a layout and a mask on a ring; a ring rank has the pooled rows of its head group.

    Pieces are computed at first use, and cached. Plans are cached by value: `plan_of`.
    """

    def __init__(self, layout: Layout, mask: Mask, n: int, placement: Placement) -> None:
        self.layout, self.mask, self.n, self.placement = layout, mask, n, placement
        self.size, self.heads = placement.ring_size, placement.heads
        self.rows = layout.padded(n, placement.size) // self.size
        """Local rows of a ring rank."""
        self.bands = mask.bands(n)
        self.by_class = mask.stride > 1 and self._fine()
        """Whether pieces count rows in the order of classes (`reading.in_classes`)."""
        if self.by_class:
            self.bands = in_classes(self.bands, mask.stride, self.rows * self.size)
        self.cache: dict[tuple[Any, ...], Any] = {}
        """Cached results of functions of the plan: see `cached_on_plan`."""

    def _fine(self) -> bool:
        """Return whether a ring rank has many intervals, all without gaps."""
        table = self.layout.run_table(self.n, self.placement.size)
        return len(table) > FEW * self.size and bool((table[:, 3] == 1).all())

    def runs(self, ring_rank: int, member: int) -> Runs:
        """Return the global positions of a rank's rows."""
        return self.layout.runs(self.n, self.placement.rank(ring_rank, member), self.placement.size)

    @cached_on_plan
    def stretches(self, ring_rank: int, part: int | None = None) -> tuple[Stretch, ...]:
        """Return the rows of a ring rank, or of one member of its head group (an item for each interval).

        The members' rows are pooled: in ascending order without gaps in intervals, else interval by interval.
        """
        everyone = self._everyone
        if part is None and everyone is not None:
            bounds = torch.tensor([ring_rank, ring_rank + 1])
            begin, end = torch.searchsorted(everyone.first, self._span * bounds).tolist()
            first, offsets = everyone.first[begin:end], everyone.offsets[begin : end + 1]
            return (Stretch(first - self._span * ring_rank, offsets - self.rows * ring_rank, everyone.step),)
        runs = sorted(
            (run for member in range(self.heads) for run in self.runs(ring_rank, member)),
            key=lambda run: run.start,
        )
        starts = accumulate(map(len, runs), initial=0)
        shard = set(runs if part is None else self.runs(ring_rank, part))
        return tuple(Stretch.of(run, start) for run, start in zip(runs, starts, strict=False) if run in shard)

    @property
    def _span(self) -> int:
        """The offset in positions between consecutive ring ranks in `_everyone`."""
        return self.rows * self.size

    @cached_property
    def _everyone(self) -> Stretch | None:
        """The concatenated rows of all ring ranks; None where each interval needs its own `Stretch`."""
        table = self.layout.run_table(self.n, self.placement.size)
        step, overflows = int(table[0, 3]), self._span * self.size >= UNBOUNDED
        if overflows or self._dilated or (step > 1 and len(table) > self.size):
            return None
        ring_rank, start, stop = self.placement.ring_rank(table[:, 0]), table[:, 1], table[:, 2]
        order = (ring_rank * self._span + start).argsort()
        ring_rank, start, stop, _ = joined_table(ring_rank[order], start[order], stop[order]).unbind(1)
        length = -((start - stop) // step)
        offsets = torch.cat([torch.zeros_like(length[:1]), length.cumsum(0)])
        return Stretch(ring_rank * self._span + start, offsets, step)

    def prefix(self, cut: int) -> Plan:
        """Return the plan of the prefix of queries before global position `cut`; later queries see no key."""
        if cut >= self.n:
            return self
        return plan_of(self.layout, self.mask & prefix_mask(cut, self.n), self.n, self.placement)

    @cached_on_plan
    def rows_from(self, ring_rank: int, cut: int) -> Rows:
        """Return the rows of a ring rank from global position `cut` on."""
        stretches, cuts = self.stretches(ring_rank, None), torch.tensor([cut])
        return union([range(int(x.rows_before_each(cuts)), x.rows.stop) for x in stretches])

    def pieces(
        self,
        q_at: int,
        k_at: int,
        *,
        q_part: int | None = None,
        k_part: int | None = None,
        keys_stay: bool = False,
    ) -> Tensor:
        """Return the disjoint pieces of queries of a ring rank, or a member, and keys of another.

        If the plan is `by_class`, pieces count rows in its `order`.

        Args:
            keys_stay: a hint for the cache: the caller next asks for other queries with the same keys, else
                for other keys with the same queries.

        Returns:
            int64 [pieces, 8], with the fields of `Piece` as columns.
        """
        if not self.reading(of_queries=False).meets[k_at, q_at]:
            return NO_PIECES
        if q_at != k_at and not self.by_class and self._everyone is not None:
            if keys_stay and q_part is None:
                return self._met(k_at, k_part, True)[q_at]
            if k_part is None:
                return self._met(q_at, q_part, False)[k_at]
        sides = product(self._counted(q_at, q_part), self._counted(k_at, k_part))
        return torch.cat([self._meet(q, k) for q, k in sides])

    @cached_on_plan
    def _met(self, ring_rank: int, part: int | None, keys_stay: bool) -> tuple[Tensor, ...]:
        """Return the pieces of a ring rank's, or a member's, queries (or keys) with every other ring rank.

        All other ring ranks are handled at once, as parts of one sequence: see `_everyone`.
        """
        everyone, meets = self._everyone, self.reading(of_queries=False).meets
        assert everyone is not None
        others = (meets[ring_rank] if keys_stay else meets[:, ring_rank]).nonzero()
        moves = self._span * others[others != ring_rank][:, None, None] * torch.tensor([0, 0, 1, 1, 1, 1])
        bands, parts = transposed(self.bands) if keys_stay else self.bands, []
        for side in self.stretches(ring_rank, part):
            first, stop = side.rows_before_each(bands[:, :2]).unbind(1)
            subset = bands[first < stop]
            bands_of_others = torch.where(subset.abs() < UNBOUNDED, subset + moves, subset).flatten(0, 1)
            parts.append(_pieces(side, everyone, bands_of_others))
        pieces = torch.cat(parts)
        owners = pieces[:, 2] // self.rows
        pieces[:, 2:4] -= owners[:, None] * self.rows
        if keys_stay:
            pieces[:, :6] = transposed(pieces[:, :6])
        by_ring_rank = pieces[owners.argsort(stable=True)]
        return tuple(by_ring_rank.split(owners.bincount(minlength=self.size).tolist()))

    def _counted(self, ring_rank: int, part: int | None) -> tuple[Stretch, ...]:
        """Return the rows in the order in which pieces count them: by classes if the plan is `by_class`."""
        return (self._classes(ring_rank, part)[0],) if self.by_class else self.stretches(ring_rank, part)

    @cached_on_plan
    def _classes(self, ring_rank: int, part: int | None) -> tuple[Stretch, list[range]]:
        """Return positions and rows of a ring rank, or of a member, in the order of classes."""
        stretches = self.stretches(ring_rank, part)
        table = torch.cat([torch.stack([x.first, x.offsets[:-1], x.offsets.diff()], 1) for x in stretches])
        intervals = [(range(first, first + length), row) for first, row, length in table.tolist()]
        runs, rows = numbered(intervals, self.mask.stride, self._span)
        ends = torch.tensor([*accumulate(map(len, runs), initial=0)])
        return Stretch(torch.tensor([run.start for run in runs]), ends), rows

    @cached_on_plan
    def order(self, ring_rank: int, part: int | None, rotate: Rows) -> Order:
        """Return the order of rows in pieces of a plan `by_class`; rotate: as in `Order`."""
        return Order(self._classes(ring_rank, part)[1], rotate)

    @cached_on_plan
    def reading(self, *, of_queries: bool) -> Reading:
        """Return the remote rows of all ring ranks: the keys, or the queries, that each reads."""
        return reading(self.layout, self.mask, self.n, self.placement, of_queries=of_queries)

    def needed(self, owner: int, reader: int, *, of_queries: bool) -> Rows:
        """Return the rows of `owner` that `reader` reads: its keys, or its queries."""
        return self.reading(of_queries=of_queries).needed(owner, reader)

    @property
    def everything(self) -> bool:
        """Whether every ring rank reads all of every other."""
        return not self.mask.terms and self.n == self.rows * self.size

    @property
    def _dilated(self) -> bool:
        """Whether pieces have the mask's step: then each is of one interval of queries and one of keys."""
        return self.mask.stride > 1 and not self.by_class

    def _meet(self, q: Stretch, k: Stretch) -> Tensor:
        if not self._dilated:
            return _pieces(q, k, self.bands, square=self.by_class)
        offset, common = int(q.first[0] - k.first[0]), gcd(q.step, self.mask.stride)
        if offset % common:
            return NO_PIECES
        step = self.mask.stride // common
        shift = offset // common * pow(q.step // common, -1, step) % step if step > 1 else 0
        return _straight(q, k, self.bands, step, shift)


PLANS = 64
"""The number of cached plans, of the most recent masks, layouts and lengths. A batch needs one for each of
its rows and kinds of layers."""


@lru_cache(maxsize=PLANS)
def plan_of(layout: Layout, mask: Mask, n: int, placement: Placement) -> Plan:
    """Return the plan of a mask over n tokens, sharded over the ranks of a placement. Cached.

    Raises:
        ValueError: the mask does not fit n tokens, or the layout the number of ranks.
    """
    return Plan(layout, mask, n, placement)


def prefix_mask(cut: int, n: int) -> Mask:
    """Return the mask of the prefix before position `cut` of n: later queries see no key."""
    return Mask.ranges([[0, cut]], [[0, n]]) if cut else Mask.ranges([], [])


def _in_rows(q: Stretch, k: Stretch, bands: Tensor) -> Tensor:
    """Return bands as rectangles of local rows, without empty bands; diagonals stay in positions."""
    rows = torch.cat([q.rows_before_each(bands[:, :2]), k.rows_before_each(bands[:, 2:4])], 1)
    some = (rows[:, 0] < rows[:, 1]) & (rows[:, 2] < rows[:, 3])
    return torch.cat([rows, bands[:, 4:]], 1)[some]


def _straight(q: Stretch, k: Stretch, bands: Tensor, step: int, shift: int) -> Tensor:
    """Return the pieces of two intervals: n - m of rows is j - i of positions, divided by their step."""
    offset = int(k.first[0] - q.first[0]) - q.step * (k.rows.start - q.rows.start)  # j - i where n = m
    local = _in_rows(q, k, bands)
    low, high = local[:, 4:].unbind(1)
    low = torch.where(low > -UNBOUNDED, -((offset - low) // q.step), low)
    high = torch.where(high < UNBOUNDED, (high - offset) // q.step, high)
    pieces = _from_corners(tightened(torch.cat([local[:, :4], low[:, None], high[:, None]], 1)))
    if step > 1:
        shifts = shift - (pieces[:, 2] - k.rows.start) + (pieces[:, 0] - q.rows.start)
        pieces[:, 6:] = torch.stack([torch.full_like(shifts, step), shifts % step], 1)
    return pieces


def _from_corners(rectangles: Tensor) -> Tensor:
    """Return the pieces of rectangles [many, 6 or 7] with diagonals counted from row 0 and column 0."""
    bounds, offset = rectangles[:, 4:6], rectangles[:, 2:3] - rectangles[:, :1]
    bounds = torch.where(bounds.abs() < UNBOUNDED, bounds - offset, bounds)
    return torch.cat([rectangles[:, :4], bounds, torch.tensor([[1, 0]]).expand(len(bounds), -1)], 1)


def _pieces(q: Stretch, k: Stretch, bands: Tensor, *, square: bool = False) -> Tensor:
    """Return the pieces of two sets of rows under some bands; square: as in `_cut`."""
    rectangles = _in_rows(q, k, bands)
    rectangles = torch.cat([rectangles, torch.arange(len(rectangles))[:, None]], 1)
    parts = [rectangles[:0]]
    if q is k:  # the order of rows is that of positions
        causal = (rectangles[:, 4] == -UNBOUNDED) & (rectangles[:, 5] == 0)
        whole = tight(rectangles[causal, :6])
        parts.append(torch.cat([whole, rectangles[causal, 6:]], 1))
        rectangles = rectangles[~causal]
    while len(rectangles):
        whole, rectangles = _cut(q, k, rectangles, square=square)
        parts.append(whole)
    rectangles = torch.cat(parts)
    rectangles = rectangles[has_pairs(rectangles[:, :6])]
    return _from_corners(_merged(rectangles) if len(parts) > 2 else rectangles)


def _cut(q: Stretch, k: Stretch, rectangles: Tensor, *, square: bool) -> tuple[Tensor, Tensor]:
    """Return the rectangles that are full, empty or straight, and halves of the other rectangles.

    Args:
        rectangles: [many, 7]: the columns of bands over rows, and a number that halves inherit.
        square: cut the longer side, instead of queries first. The number of pieces under a diagonal is the
            same, but they have n log n rows together, not n * n, which matters for rows with gaps.
    """
    m0, m1, n0, n1, low, high, band = rectangles.unbind(1)
    first, last = q.positions(m0), q.positions(m1 - 1)
    n0 = torch.maximum(n0, k.rows_before_each(first + low))
    n1 = torch.minimum(n1, k.rows_before_each(last + high + 1))
    left, right = k.positions(n0), k.positions(n1 - 1)
    m0 = torch.maximum(m0, q.rows_before_each(left - high))
    m1 = torch.minimum(m1, q.rows_before_each(right - low + 1))
    columns = torch.stack([m0, m1, n0, n1, low, high, band, left, right])
    m0, m1, n0, n1, low, high, band, left, right = columns[:, (m0 < m1) & (n0 < n1)]
    first, last = q.positions(m0), q.positions(m1 - 1)
    open_low, open_high = low <= left - last, right - first <= high
    row, column = q.cut(m0, m1), k.cut(n0, n1)
    by_row = (row >= 0) & ((column < 0) | (m1 - m0 >= n1 - n0 if square else row >= 0))
    whole = (open_low & open_high) | (~by_row & (column < 0))
    distance, row_offset = left - first, n0 - m0  # of the corner, in positions and in rows
    lowest = torch.where(open_low, -UNBOUNDED, row_offset - (distance - low) // q.step)
    highest = torch.where(open_high, UNBOUNDED, row_offset + (high - distance) // q.step)
    rows = tight(torch.stack([m0, m1, n0, n1, lowest, highest], 1))  # rows that no pair needs do not rotate
    finished = torch.cat([rows, band[:, None]], 1)[whole]
    upper = m0, torch.where(by_row, row, m1), n0, torch.where(by_row, n1, column), low, high, band
    lower = torch.where(by_row, row, m0), m1, torch.where(by_row, n0, column), n1, low, high, band
    return finished, torch.cat([torch.stack(half, 1)[~whole] for half in (upper, lower)])


def _merged(rectangles: Tensor) -> Tensor:
    """Join neighbouring full rectangles of a band: first along rows, then along columns."""
    for low, high, across in ((0, 1, 2), (2, 3, 0)):
        for column in (low, across, 6):
            rectangles = rectangles[rectangles[:, column].argsort(stable=True)]
        before, after = rectangles[:-1], rectangles[1:]
        same = before[:, [high, across, across + 1, 4, 5, 6]] == after[:, [low, across, across + 1, 4, 5, 6]]
        joins = same.all(1) & (after[:, 4] == -UNBOUNDED) & (after[:, 5] == UNBOUNDED)
        end = torch.ones_like(rectangles[:1, 0], dtype=torch.bool)
        last = rectangles[torch.cat([~joins, end]), high]
        rectangles = rectangles[torch.cat([end, ~joins])]
        rectangles[:, high] = last
    return rectangles
