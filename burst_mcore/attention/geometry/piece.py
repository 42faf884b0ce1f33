"""Pieces: rectangles of query and key rows within two diagonals. Plans and patterns consist of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burst_mcore.mask.bands import UNBOUNDED


class Piece(NamedTuple):
    """Query rows [m0, m1) x key rows [n0, n1), of which pairs with low <= (n - n0) - (m - m0) <= high meet.

    Where `step` is not 1, only pairs with (n - n0) - (m - m0) = shift (mod step) meet.
    """

    m0: int
    m1: int
    n0: int
    n1: int
    low: int
    high: int
    step: int = 1
    shift: int = 0

    @property
    def full(self) -> bool:
        """Every row meets every column."""
        return self.low == -UNBOUNDED and self.high == UNBOUNDED and self.step == 1

    @property
    def pairs(self) -> int:
        """Query-key pairs that meet."""
        rows, columns = self.m1 - self.m0, self.n1 - self.n0
        if self.step == 1:
            return band_pairs(rows, columns, self.low, self.high)
        return sum(band_pairs(len(q), len(k), low, high) for q, k, low, high in self.residues())

    def residues(self) -> list[tuple[range, range, int, int]]:
        """Return (rows, columns, low, high) of each residue, counted from the piece's corner."""
        residues = []
        for first in range(min(self.step, self.m1 - self.m0)):
            column = (first + self.shift) % self.step
            q = range(first, self.m1 - self.m0, self.step)
            k = range(column, self.n1 - self.n0, self.step)
            low = -(-(self.low - column + first) // self.step) if self.low > -UNBOUNDED else -UNBOUNDED
            high = (self.high - column + first) // self.step if self.high < UNBOUNDED else UNBOUNDED
            if k:
                residues.append((q, k, low, high))
        return residues


NO_PIECES = torch.zeros(0, len(Piece._fields), dtype=torch.int64)
"""A table of pieces, [pieces, 8]: the columns are the fields of `Piece`."""


def listed(pieces: Tensor) -> list[Piece]:
    """Return the pieces of a table."""
    return [Piece(*row) for row in pieces.tolist()]


def band_pairs(rows: int, columns: int, low: int, high: int) -> int:
    """Return how many pairs (m, n) of a rectangle have low <= n - m <= high."""
    return _below(rows, columns, high) - _below(rows, columns, low - 1)


def _below(rows: int, columns: int, high: int) -> int:
    """Return the pairs with n - m <= high: the sum over m of clamp(m + high + 1, 0, columns)."""
    first, last = max(0, -high), min(rows, columns - high - 1)  # rows in which it is neither 0 nor columns
    if first >= last:
        return columns * max(0, rows - max(0, columns - high - 1))
    return (first + last - 1 + 2 * (high + 1)) * (last - first) // 2 + columns * (rows - last)


def band_pairs_of(rows: Tensor, columns: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return `band_pairs` of many rectangles."""
    return _below_of(rows, columns, high) - _below_of(rows, columns, low - 1)


def _below_of(rows: Tensor, columns: Tensor, high: Tensor) -> Tensor:
    first, full = (-high).clamp(min=0), columns - high - 1
    last = torch.minimum(rows, full)
    ramp = (first + last - 1 + 2 * (high + 1)) * (last - first) // 2 + columns * (rows - last)
    return torch.where(first < last, ramp, columns * (rows - full.clamp(min=0)).clamp(min=0))
