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
def tiles(layout: Layout, mask: Mask, n: int, q_rank: int, k_rank: int, size: int) -> tuple[Tile, ...]:
    """The tiles in which the queries of `q_rank` meet the keys of `k_rank`; empty if none may meet.

    Args:
        n: tokens in the global sequence.
    """
    return tuple(_cut(mask, layout.runs(n, q_rank, size), layout.runs(n, k_rank, size), 0, 0))


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
    if len(q) > 1:
        upper, lower = q[:1], q[1:]
        cuts.append(
            _cut(mask, upper, k, q_start, k_start) + _cut(mask, lower, k, q_start + len(q[0]), k_start)
        )
    if len(k) > 1:
        left, right = k[:1], k[1:]
        cuts.append(
            _cut(mask, q, left, q_start, k_start) + _cut(mask, q, right, q_start, k_start + len(k[0]))
        )
    assert cuts, f"runs {q} and {k} overlap in part: no layout deals so"
    return min(cuts, key=len)


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
