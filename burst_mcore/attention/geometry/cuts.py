"""Cuts of a checkpointed sequence: results of the suffix are saved, the prefix is recomputed.

Under a causal mask the last tokens cost the most to compute (BurstEngine, sequence-level selective
checkpointing). All ranks together save a suffix of the GLOBAL sequence, so the prefix is a smaller problem
of the same kind. The layout decides the balance of the prefix, and whether a cut is worth its memory.
"""

from __future__ import annotations

import logging
import math
import numbers
from dataclasses import dataclass
from functools import lru_cache

import torch

from burst_mcore.layout import Layout
from burst_mcore.layout.balance import keys_per_query, pairs_before
from burst_mcore.mask import Mask
from burst_mcore.words import brief

logger = logging.getLogger("burst_mcore")

EVEN = 1.05
"""The maximum imbalance of a balanced cut: slowest rank over mean, relative to the whole sequence."""
LOOKED_AT = 2**22
"""The maximum of candidate cuts times ranks; of more, the cuts nearest to the requested share."""


@dataclass(frozen=True)
class Cut:
    """A cut at a global position of n: the queries before it are recomputed, results after it are saved."""

    position: int
    n: int
    time: float
    """Forward time of the prefix over the whole sequence's, as query-key pairs of the slowest rank."""
    imbalance: float
    """Pairs of the slowest rank in the prefix over the mean."""

    @property
    def keep(self) -> float:
        """The saved share of the sequence."""
        return 1 - self.position / self.n

    @property
    def pays(self) -> bool:
        """Whether the saved share of time is at least the used share of memory."""
        return 1 - self.time >= self.keep - 1e-9


def check_keep(keep: float) -> float:
    """Return `keep` as a float; ValueError if it is not a share from 0 to 1."""
    if isinstance(keep, bool) or not isinstance(keep, numbers.Real) or not 0 <= keep <= 1:
        raise ValueError(f"keep must be a share of the sequence, from 0 to 1, got {brief(keep)}")
    return float(keep)


@lru_cache(maxsize=256)
def cut_for(keep: float, layout: Layout, mask: Mask, n: int, size: int, *, at_most: bool = False) -> Cut:
    """Return the legal cut nearest to saving `keep` of n tokens that `layout` shards over `size` ranks.

    The ends are legal (save nothing, save all), and cuts that pay (`Cut.pays`) with a prefix about as
    balanced as the whole sequence (within `EVEN`). Where no cut is balanced, as on plain zigzag, every cut
    that pays is legal. Striped balances every cut. A tie goes to the cut that saves less.

    at_most: do not save more than `keep`.

    Raises:
        ValueError: keep is not from 0 to 1, or n tokens do not fit the mask, or the ranks the layout.
    """
    keep = check_keep(keep)
    target = n - (math.floor(keep * n + 1e-9) if at_most else round(keep * n))
    if layout.rule.even_everywhere:
        up = size - 1 if at_most else size // 2
        target = min(n, (target + up) // size * size)
    cuts = _weighed(_positions(layout, n, size, target), layout, mask, n, size)
    if layout.rule.even_everywhere and size > 1:  # to a key per query
        legal = [cut for cut in cuts if cut.position == target]
    else:
        imbalance = cuts[-1].imbalance
        paying = [cut for cut in cuts if 0 < cut.position < n and cut.pays]
        legal = [cut for cut in paying if cut.imbalance <= EVEN * imbalance] or paying
    legal += [cuts[0], cuts[-1]]
    if at_most:
        legal = [cut for cut in legal if cut.position >= target]
    nearest = min(legal, key=lambda cut: (abs(cut.position - target), -cut.position))
    if abs(nearest.position - target) > max(size, 0.01 * n) and not at_most:
        _say_moved(keep, nearest.keep, layout, size)
    return nearest


@lru_cache(maxsize=256)
def _say_moved(keep: float, nearest: float, layout: Layout, size: int) -> None:
    moved = (
        "segment recompute: keep=%.3g is moved to %.3g, the nearest cut that is worth its memory on layout "
        "%s over %d ranks; striped can be cut anywhere, stacked-zigzag:4 at every quarter"
    )
    logger.warning(moved, keep, nearest, layout, size)


def _positions(layout: Layout, n: int, size: int, target: int) -> list[int]:
    """Return candidate positions, ascending: the ends, the requested position, and edges of chunks."""
    if layout.rule.even_everywhere or size == 1:
        return sorted({0, target, n})
    edges = layout.edges(n, size)
    if layout.rule.even_at_edges:
        return sorted({0, n, *edges.tolist()})
    limit = max(8, LOOKED_AT // (size * len(layout.runs(n, 0, size))))
    if len(edges) > limit:
        edges = edges[(edges - target).abs().argsort(stable=True)[:limit]]
    return sorted({0, target, n, *edges.tolist()})


def _weighed(positions: list[int], layout: Layout, mask: Mask, n: int, size: int) -> list[Cut]:
    """Return a `Cut` for each position; the last position is n."""
    cuts = torch.tensor(positions)
    if layout.rule.even_at_edges:
        work = keys_per_query(mask, n).cumsum(0)[cuts - 1].where(cuts > 0, 0)[:, None].expand(-1, size)
    else:
        work = pairs_before(layout, mask, n, size, cuts)
    slowest, mean = work.amax(1), work.double().mean(1)
    time = slowest.double() / slowest[-1].clamp(min=1)
    imbalance = torch.where(mean > 0, slowest / mean, 1.0)
    rows = zip(positions, time.tolist(), imbalance.tolist(), strict=True)
    return [Cut(position, n, share, uneven) for position, share, uneven in rows]
