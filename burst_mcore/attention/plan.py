"""layout x mask -> tiles: which local query rows meet which local key rows of another rank, and how.

Zigzag on G ranks, chunk pairs (r, 2G-1-r), causal, needs one tile for every pair of ranks: causal on the
concatenation at home, all queries x front keys from lower ranks, back queries x all keys from higher ones.
Nothing here knows that: it falls out of cutting the two lists of runs until each piece is empty, full or
causal, and keeping the cut that leaves the fewest tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from burst_mcore.attention.mask import Mask
from burst_mcore.layout import Layout

Runs = tuple[range, ...]


@dataclass(frozen=True)
class Tile:
    """Local query rows [q.start, q.stop) x local key rows [k.start, k.stop): full, or causal.

    A causal tile is square and aligned: local row m sees local column n iff n <= m, counted from its corner.
    """

    q: range
    k: range
    causal: bool

    @property
    def pairs(self) -> int:
        """Allowed query-key pairs: the work, in units of 4 * head_dim FLOPs a head in forward."""
        return len(self.q) * (len(self.q) + 1) // 2 if self.causal else len(self.q) * len(self.k)


@lru_cache(maxsize=4096)
def tiles(
    layout: Layout,
    mask: Mask,
    n: int,
    q_rank: int,
    k_rank: int,
    size: int,
    *,
    heads: int = 1,
    q_part: int | None = None,
    k_part: int | None = None,
) -> tuple[Tile, ...]:
    """The tiles in which the queries of `q_rank` meet the keys of `k_rank`; empty if none may meet.

    Args:
        n: tokens in the global sequence.
        q_rank, k_rank, size: positions on the ring, and how many there are.
        heads: ranks of a position (head x ring): their tokens are pooled.
        q_part, k_part: only the rows that this member of the head group brought.
    """
    return tuple(
        tile
        for q, q_start in _placed(layout, n, q_rank, size, heads, q_part)
        for k, k_start in _placed(layout, n, k_rank, size, heads, k_part)
        for tile in _cut(mask, q, k, q_start, k_start)
    )


@lru_cache(maxsize=4096)
def pooled_rows(
    layout: Layout, n: int, position: int, size: int, heads: int, member: int
) -> tuple[range, ...]:
    """Where the rows of a member of a head group lie among its position's, in the order of its own rows.

    Positions hold their tokens as ranks of a ring of `size` would: `layout` must deal so that the tokens of
    `heads` neighbours on the ring of size * heads are those of one rank of the smaller ring.

    Raises:
        ValueError: the layout does not.
    """
    placed = _placed(layout, n, position, size, heads, member)
    return tuple(range(start, start + sum(map(len, runs))) for runs, start in placed)


def _placed(
    layout: Layout, n: int, position: int, size: int, heads: int, member: int | None
) -> list[tuple[Runs, int]]:
    """(runs, the local row that they begin at) of all rows of a position, or of one member's."""
    pooled = layout.runs(n, position, size)
    if member is None:
        return [(pooled, 0)]
    placed: list[tuple[Runs, int]] = []
    for run in layout.runs(n, position * heads + member, size * heads):
        start = 0
        for whole in pooled:
            if run[0] in whole and run[-1] in whole and run.step == whole.step:
                placed.append(((run,), start + whole.index(run[0])))
            start += len(whole)
    if sum(len(runs[0]) for runs, _ in placed) * heads != n // size:
        raise ValueError(
            f"head_parallel={heads} does not go with layout {layout}: the tokens of {heads} neighbours are "
            f"not those of one rank of a smaller ring"
        )
    return placed


def _cut(mask: Mask, q: Runs, k: Runs, q_start: int, k_start: int) -> list[Tile]:
    """Tiles for the runs `q` and `k`, which begin at local rows q_start and k_start."""
    relation = _relate(mask, q, k)
    if relation == "empty":
        return []
    if relation is not None:
        q_rows, k_rows = (
            range(start, start + sum(map(len, runs))) for start, runs in ((q_start, q), (k_start, k))
        )
        return [Tile(q_rows, k_rows, causal=relation == "causal")]
    cuts = []
    for upper, lower in _halves(q, k):
        below = q_start + sum(map(len, upper))
        cuts.append(_cut(mask, upper, k, q_start, k_start) + _cut(mask, lower, k, below, k_start))
    for left, right in _halves(k, q):
        beyond = k_start + sum(map(len, left))
        cuts.append(_cut(mask, q, left, q_start, k_start) + _cut(mask, q, right, q_start, beyond))
    return min(cuts, key=len)


def _halves(runs: Runs, others: Runs) -> list[tuple[Runs, Runs]]:
    """Where to cut `runs`: after the first, or, where there is one, at the ends of the other's one."""
    if len(runs) > 1:
        return [(runs[:1], runs[1:])]
    (run,) = runs
    if len(others) > 1:
        return []
    ends = [at for at in (others[0].start, others[0].stop) if run.start < at < run.stop]
    return [((range(run.start, at),), (range(at, run.stop),)) for at in ends]


def _relate(mask: Mask, q: Runs, k: Runs) -> str | None:
    """How all of `q` stands to all of `k`: "full", "empty", "causal" (same rows), or None: cut further."""
    if mask.kind == "full":
        return "full"
    if max(run[-1] for run in q) < min(run[0] for run in k):
        return "empty"
    if min(run[0] for run in q) >= max(run[-1] for run in k):
        return "full"
    in_order = all(before[-1] < after[0] for before, after in pairwise(q))
    return "causal" if q == k and in_order else None
