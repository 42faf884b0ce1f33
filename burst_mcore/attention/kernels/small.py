"""Tiles of a few rows or keys, at which cuDNN fails: another kernel does them.

Its backward refuses one row with one key, and notes of its releases name more that small shapes break.
Cutting a window leaves such tiles, and so do short documents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.kernels.kernel import Kernel, RowGradients, Scores

logger = logging.getLogger("burst_mcore")

LEAST = 64
"""Rows and keys of a tile that cuDNN is called for."""


def leaves_small_tiles(kernel: Kernel, to: Callable[[Scores], Kernel]) -> Kernel:
    """`kernel`, with tiles of fewer than LEAST rows or keys done by one that serves all that it does.

    The first of them is logged.
    """

    def chosen(seen: Seen, how: Scores) -> Kernel:
        if min(seen.shape) >= LEAST:
            return kernel
        other = to(how)
        _tell(kernel.name, other.name)
        return other

    def forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
        return chosen(seen, how).forward(q, k, v, seen, how)

    def backward(x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
        return chosen(seen, how).backward(x, seen, how)

    return replace(kernel, forward=forward, backward=backward)


@lru_cache
def _tell(name: str, other: str) -> None:
    """Once for each pair."""
    logger.info("kernel %s: tiles of under %d rows or keys are left to %s", name, LEAST, other)
