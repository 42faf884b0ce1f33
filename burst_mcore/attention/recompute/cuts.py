"""Where to cut a sequence whose end is kept and whose front is computed again. Pure functions.

Of a checkpointed layer, O and LSE of the last tokens may be kept: under a causal mask these cost the most to
compute (BurstEngine, sequence-level selective checkpointing). What is kept of all ranks is one end of the
GLOBAL sequence, so that the front is a smaller problem of the same kind; how even the front's work is, and
whether a cut is worth its memory, depends on how the layout deals it.
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

logger = logging.getLogger("burst_mcore")

EVEN = 1.05
"""Work of the slowest rank over the mean, relative to that of the whole sequence, of a balanced cut."""
LOOKED_AT = 2**22
"""Cuts times ranks, at most, that are weighed; of more, those nearest to what was asked for."""


@dataclass(frozen=True)
class Cut:
    """Queries before a global position of n are computed again, and the results from there on were saved."""

    position: int
    n: int
    time: float
    """Query-key pairs of the slowest rank in the front over those of the slowest in the whole sequence: of
    the time of a forward, what computing the front takes."""
    imbalance: float
    """Pairs of the slowest rank in the front over the mean."""

    @property
    def keep(self) -> float:
        """The share of the sequence that is kept."""
        return 1 - self.position / self.n

    @property
    def pays(self) -> bool:
        """Whether it saves at least the share of time that it takes of the memory, as whole layers do."""
        return 1 - self.time >= self.keep - 1e-9


def check_keep(keep: float) -> float:
    """`keep`, if it is a share; ValueError if not."""
    if isinstance(keep, bool) or not isinstance(keep, numbers.Real) or not 0 <= keep <= 1:
        raise ValueError(f"keep must be a share of the sequence, from 0 to 1, got {keep!r}")
    return float(keep)


@lru_cache(maxsize=256)
def cut_for(keep: float, layout: Layout, mask: Mask, n: int, size: int, *, at_most: bool = False) -> Cut:
    """The legal cut nearest to keeping `keep` of n tokens that `layout` deals over `size` ranks.

    Legal are the ends (keep nothing, keep all), and the cuts that pay (`Cut.pays`) and that the layout
    balances as well as it does the whole sequence (within `EVEN`); where there are none, as on plain zigzag,
    all that pay. Striped deals everything evenly. Of two cuts as near, the one that keeps less.

    Args:
        keep: from 0 to 1.
        at_most: do not keep more than `keep`.

    Raises:
        ValueError: keep is no such share; or the mask does not go with n tokens, or the layout not with so
            many ranks.
    """
    keep = check_keep(keep)
    asked = n - (math.floor(keep * n + 1e-9) if at_most else round(keep * n))
    if layout.even_everywhere:
        up = size - 1 if at_most else size // 2
        asked = min(n, (asked + up) // size * size)
    cuts = _weighed(_positions(layout, n, size, asked), layout, mask, n, size)
    if layout.even_everywhere and size > 1:  # to a key per query
        legal = [cut for cut in cuts if cut.position == asked]
    else:
        whole = cuts[-1].imbalance
        paying = [cut for cut in cuts if 0 < cut.position < n and cut.pays]
        legal = [cut for cut in paying if cut.imbalance <= EVEN * whole] or paying
    legal += [cuts[0], cuts[-1]]
    if at_most:
        legal = [cut for cut in legal if cut.position >= asked]
    chosen = min(legal, key=lambda cut: (abs(cut.position - asked), -cut.position))
    if abs(chosen.position - asked) > max(size, 0.01 * n) and not at_most:
        _say_moved(keep, chosen.keep, layout, size)
    return chosen


def head_mask(cut: int, n: int) -> Mask:
    """Return the mask under which only queries before position `cut` of n see any key."""
    return Mask.ranges([[0, cut]], [[0, n]]) if cut else Mask.ranges([], [])


@lru_cache(maxsize=256)
def _say_moved(keep: float, chosen: float, layout: Layout, size: int) -> None:
    """Once for each."""
    logger.warning(
        "segment recompute: keep=%.3g is moved to %.3g, the nearest cut that is worth its memory on layout "
        "%s over %d ranks; striped can be cut anywhere, stacked-zigzag:4 at every quarter",
        keep,
        chosen,
        layout,
        size,
    )


def _positions(layout: Layout, n: int, size: int, asked: int) -> list[int]:
    """Cuts to look at, ascending: the ends, what was asked for, and the edges of what the layout deals."""
    if layout.even_everywhere or size == 1:
        return sorted({0, asked, n})
    edges = layout.edges(n, size)
    if layout.even_at_edges:
        return sorted({0, n, *edges.tolist()})
    most = max(8, LOOKED_AT // (size * len(layout.runs(n, 0, size))))
    if len(edges) > most:
        edges = edges[(edges - asked).abs().argsort(stable=True)[:most]]
    return sorted({0, asked, n, *edges.tolist()})


def _weighed(positions: list[int], layout: Layout, mask: Mask, n: int, size: int) -> list[Cut]:
    """A `Cut` of each position, the last of which is n."""
    cuts = torch.tensor(positions)
    if layout.even_at_edges:
        work = keys_per_query(mask, n).cumsum(0)[cuts - 1].where(cuts > 0, 0)[:, None].expand(-1, size)
    else:
        work = pairs_before(layout, mask, n, size, cuts)
    slowest, mean = work.amax(1), work.double().mean(1)
    time = slowest.double() / slowest[-1].clamp(min=1)
    imbalance = torch.where(mean > 0, slowest / mean, 1.0)
    rows = zip(positions, time.tolist(), imbalance.tolist(), strict=True)
    return [Cut(position, n, share, uneven) for position, share, uneven in rows]
