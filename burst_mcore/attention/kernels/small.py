"""Leaves tiles of a few rows or keys, at which cuDNN fails, to another kernel.

cuDNN's backward refuses one row with one key, and its release notes name more small shapes that break.
Windows that are cut leave such tiles, and so do short documents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Gradients, Kernel, Results, Scores

logger = logging.getLogger("burst_mcore")

LEAST = 64
"""Rows and keys, at least, of a tile that cuDNN is called for."""


def leaves_small_tiles(kernel: Kernel, to: Callable[[Scores], Kernel]) -> Kernel:
    """Return `kernel`, with tiles of fewer than LEAST rows or keys left to a kernel that serves as much.

    The first such tile is logged.
    """

    def chosen(pattern: Pattern, scores: Scores) -> Kernel:
        if min(pattern.shape) >= LEAST:
            return kernel
        other = to(scores)
        _tell(kernel.name, other.name)
        return other

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> Results:
        return chosen(pattern, scores).forward(q, k, v, pattern, scores)

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> Gradients:
        return chosen(pattern, scores).backward(inputs, pattern, scores)

    return replace(kernel, forward=forward, backward=backward)


@lru_cache
def _tell(name: str, other: str) -> None:
    """Log the first small tile of each pair of kernels."""
    logger.info("kernel %s: tiles of under %d rows or keys are left to %s", name, LEAST, other)
