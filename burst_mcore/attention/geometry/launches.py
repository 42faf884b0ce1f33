"""How much work a kernel gets in one launch under a mask: the reason to prefer kernels that take many pieces.

A launch costs time besides its pairs, and a small tile leaves most of a GPU idle. So what counts in the
choice of a kernel is the size of its launches, not the kind of mask. Sizes are those of the whole sequence on
one device: layouts cut the pieces of all kernels alike.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import torch

from burst_mcore.attention.geometry.pattern import Abilities
from burst_mcore.attention.geometry.piece import band_pairs_of
from burst_mcore.attention.geometry.tiles import DIAGONAL, PACKED
from burst_mcore.mask import Mask

ROW = 256
"""Pairs that take as long as one row more of a launch, whose output is written and merged."""
LAUNCH = 2**19
"""Pairs that take as long as the overhead of a launch and of the merge after it: about 10 us of 32 heads."""


class Launches(NamedTuple):
    """The mean pairs of a launch, as powers of two, by what a kernel can take at once."""

    alone: int
    """One rectangle, full or causal."""
    windows: int
    """One band within any two diagonals."""
    packed: int
    """Small diagonals, one after another."""
    whole: int
    """Everything."""

    def of(self, abilities: Abilities) -> int:
        """Return the mean pairs of a launch of a kernel of these abilities, as a power of two."""
        if abilities.pieces:
            return self.whole
        if abilities.packed:
            return self.packed
        return self.windows if abilities.windows else self.alone


LARGE = Launches(40, 40, 40, 40)
"""Launches so large that their number costs nothing."""


def launches_of(mask: Mask, n: int) -> Launches:
    """Return how large launches are under a mask of n tokens.

    Rows that are met several times count as launches, too: each time their results are merged.
    """
    q0, q1, k0, k1, low, high = mask.bands(n).unbind(1)
    rows, columns, apart = q1 - q0, k1 - k0, k0 - q0
    pairs = band_pairs_of(rows, columns, low - apart, high - apart)
    cut = (low > k0 - (q1 - 1)) & (high < (k1 - 1) - q0)  # both diagonals cut the rectangle
    blocks = torch.where(cut, 3 * -(-rows // (high - low + 2).clamp(1, DIAGONAL)), 1)
    step, small = mask.stride, (pairs <= PACKED) & (mask.stride == 1)
    again = max(0, int(rows.sum()) - n) * ROW / LAUNCH
    chains = max(int(x[small].sum()) for x in (rows, columns)) / n
    counts = (
        int(blocks.sum()) * step + again,
        len(pairs) * step + again,
        int((~small).sum()) * step + chains + again,
        1,
    )
    total = max(1.0, float(pairs.sum()) / step)
    return Launches(*(round(log2(total / max(count, 1))) for count in counts))
