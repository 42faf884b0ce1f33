"""The work of each token and rank under a mask, and balanced layouts. Pure functions.

Work is counted in query-key pairs: by queries (forward, and backward if K and V rotate) and by keys
(backward if queries rotate). The imbalance of G ranks is max_r work_r / mean_r work_r.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from burst_mcore.mask import Mask
from burst_mcore.mask.bands import UNBOUNDED, of_classes
from burst_mcore.mask.bands import transposed as exchanged

EVEN = 1.05
"""The maximum imbalance of a balanced layout."""
EVEN_WINDOW = 1.10
"""The maximum for windows: a contiguous layout exchanges halos with neighbours only, worth some imbalance."""
FINEST = 64
"""The maximum chunks of a rank in `candidates`."""
LOOKED_AT = 8
"""The number of candidate ranks for a chunk, with the least work."""


@lru_cache(maxsize=16)
def keys_per_query(mask: Mask, n: int, transposed: bool = False) -> Tensor:
    """Return the number of keys of each query, or of queries of each key (`transposed`), int64 [n].

    Raises:
        ValueError: the mask does not fit n tokens.
    """
    bands = mask.bands(n)
    if transposed:
        bands = exchanged(bands)
    step = mask.stride
    pairs = torch.zeros(n, dtype=torch.int64)
    for first in range(min(step, n)):  # within a residue class, every step-th token is a neighbour
        of_class = of_classes(bands, torch.tensor([first]), step)
        pairs[first::step] = _count(of_class.clamp(min=-UNBOUNDED), len(range(first, n, step)))
    return pairs


def _count(bands: Tensor, n: int) -> Tensor:
    """Return the number of keys that each of n queries sees in disjoint bands.

    In band (q0, q1, k0, k1, low, high) with w = k1 - k0, query i sees
    clamp(i + high + 1 - k0, 0, w) - clamp(i + low - k0, 0, w) keys. A clamp is a ramp with two changes of
    slope, so two cumulative sums count all bands.
    """
    jumps, slopes = torch.zeros(n + 1, dtype=torch.int64), torch.zeros(n + 2, dtype=torch.int64)
    q0, q1, k0, k1, low, high = bands.unbind(1)
    q0, q1, wide = q0.clamp(0, n), q1.clamp(0, n), k1 - k0
    some = (q0 < q1) & (wide > 0)
    for sign, begins in ((1, k0 - high - 1), (-1, k0 - low)):  # the last query with a count of 0
        a, b, c, w = (x[some] for x in (q0, q1, begins, wide))
        jumps.index_add_(0, a, sign * (a - c).clamp(min=0).minimum(w))
        jumps.index_add_(0, b, -sign * (b - 1 - c).clamp(min=0).minimum(w))
        up, down = torch.maximum(a, c) + 1, torch.minimum(b - 1, c + w) + 1
        rising = up < down
        slopes.index_add_(0, up[rising], torch.full_like(up[rising], sign))
        slopes.index_add_(0, down[rising], torch.full_like(up[rising], -sign))
    return (jumps[:n] + slopes[:n].cumsum(0)).cumsum(0)


class Sharded(Protocol):
    """The interface of `Layout` for this file, which `Layout` imports."""

    def run_table(self, n: int, size: int) -> Tensor: ...


def work(layout: Sharded, mask: Mask, n: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the query-key pairs of each rank, int64 [size]: of its queries, and of its keys.

    Raises:
        ValueError: the mask does not fit n tokens, or the layout the number of ranks.
    """
    cuts = torch.tensor([n])
    of_keys = pairs_before(layout, mask, n, size, cuts, transposed=True)[0]
    return pairs_before(layout, mask, n, size, cuts)[0], of_keys


def pairs_before(
    layout: Sharded, mask: Mask, n: int, size: int, cuts: Tensor, *, transposed: bool = False
) -> Tensor:
    """Return the query-key pairs of each rank's queries before each cut, int64 [cuts, size].

    Args:
        cuts: global positions, int64 [cuts], from 0 to n.
        transposed: of each rank's keys, instead of its queries.

    Raises:
        ValueError: as `work`.
    """
    rank, start, stop, steps = layout.run_table(n, size).unbind(1)
    if (step := int(steps[0])) > 1:  # striped: all runs have this step, and start within the first
        rows = keys_per_query(mask, n, transposed)
        parts = (torch.nn.functional.pad(rows[:cut], (0, -cut % step)) for cut in cuts.tolist())
        return torch.stack([each.view(len(each) // step, step).sum(0)[start] for each in parts])
    sums = _sums(mask, n, transposed)
    before = sums[torch.minimum(stop, cuts[:, None])] - sums[torch.minimum(start, cuts[:, None])]
    return torch.zeros(len(cuts), size, dtype=torch.int64).index_add_(1, rank, before)


@lru_cache(maxsize=4)
def _sums(mask: Mask, n: int, transposed: bool) -> Tensor:
    """Return the pairs of all rows before each row, and of all rows, int64 [n + 1]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), keys_per_query(mask, n, transposed).cumsum(0)])


def imbalance(layout: Sharded, mask: Mask, n: int, size: int) -> float:
    """Return the work of the busiest rank over the mean, the larger of queries and keys. Raises as `work`."""
    return max(
        (float(side.max()) * size / float(side.sum()) if side.any() else 1.0)
        for side in work(layout, mask, n, size)
    )


def candidates(mask: Mask, n: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of layouts, in the order of remote rows."""
    yield {"kind": "contiguous"}
    if size > 1:
        yield {"kind": "zigzag"}
        for stacks in (2, 4):
            if 2 * size * stacks <= n:
                yield {"kind": "stacked-zigzag", "stacks": stacks}
        each = 2
        while each <= FINEST and size * each <= n:
            yield {"kind": "chunks", "chunks": _sharded(mask, n, size, each)}
            each *= 2
        yield {"kind": "striped"}


def _sharded(mask: Mask, n: int, size: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Assign `each` chunks to a rank, greedily: the chunk with most work first, to the rank with least then.

    Candidates are the `LOOKED_AT` ranks with the least work before.
    """
    chunks = size * each
    edges = (torch.arange(chunks + 1) * -(-n // chunks)).clamp(max=n)
    sums = [_sums(mask, n, transposed) for transposed in (False, True)]
    of_queries, of_keys = ((x[edges[1:]] - x[edges[:-1]]).tolist() for x in sums)
    load = [(0, 0)] * size
    sharded: list[list[int]] = [[] for _ in range(size)]
    least = [(0, rank) for rank in range(size)]
    for chunk in sorted(range(chunks), key=lambda c: -max(of_queries[c], of_keys[c])):
        q, k = of_queries[chunk], of_keys[chunk]
        looked_at = [heapq.heappop(least) for _ in range(min(LOOKED_AT, len(least)))]
        after, rank = min((max(load[r][0] + q, load[r][1] + k), r) for _, r in looked_at)
        for entry in looked_at:
            if entry[1] != rank:
                heapq.heappush(least, entry)
        sharded[rank].append(chunk)
        load[rank] = load[rank][0] + q, load[rank][1] + k
        if len(sharded[rank]) < each:
            heapq.heappush(least, (after, rank))
    return tuple(map(tuple, sharded))
