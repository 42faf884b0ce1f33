"""Pieces (bands within rectangles of query and key rows), and the mask patterns of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from burst_mcore.mask.bands import UNBOUNDED


class Piece(NamedTuple):
    """A rectangle of query rows [m0, m1) x key rows [n0, n1), cut by two diagonals.

    Query m attends to key n iff low <= (n - n0) - (m - m0) <= high and, where `step` is not 1,
    (n - n0) - (m - m0) = shift (mod step).
    """

    m0: int
    m1: int
    n0: int
    n1: int
    low: int
    high: int
    step: int = 1
    shift: int = 0

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


def band_pairs_of(rows: Tensor, columns: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the number of pairs (m, n) of many rectangles with low <= n - m <= high."""
    return _below(rows, columns, high) - _below(rows, columns, low - 1)


def _below(rows: Tensor, columns: Tensor, high: Tensor) -> Tensor:
    """Return the pairs with n - m <= high: the sum over m of clamp(m + high + 1, 0, columns)."""
    first, full = (-high).clamp(min=0), columns - high - 1  # rows with a summand between 0 and columns
    last = torch.minimum(rows, full)
    ramp = (first + last - 1 + 2 * (high + 1)) * (last - first) // 2 + columns * (rows - last)
    return torch.where(first < last, ramp, columns * (rows - full.clamp(min=0)).clamp(min=0))


class Abilities(NamedTuple):
    """The patterns that a kernel supports besides full and causal patterns."""

    windows: bool = False
    """Sliding windows: row m sees column n iff low <= n - m <= high."""
    masks: bool = False
    """Any pattern, as a table of rows x columns. A kernel that adds minus infinity to scores lets NaN pass
    between documents: wrap such a kernel in `kernels.wrappers.keeps_nan_where_seen`."""
    pieces: bool = False
    """Any pattern, as pieces; pairs outside the pieces cost no time."""
    packed: bool = False
    """Packed sequences (varlen, `Packed`) in one call, with windows, too."""


NONE = Abilities()


class Packed(NamedTuple):
    """Packed sequences (varlen): queries see only keys of the same sequence.

    In a sequence of M queries and N keys, query m sees key n iff -left <= n - m - (N - M) <= right, counted
    from the lower right corner like flash-attn's windows; -1 stands for no bound.
    """

    q: tuple[int, ...]
    """Queries of each sequence."""
    k: tuple[int, ...]
    """Keys of each sequence."""
    left: int
    right: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The sequences as pieces of the tile."""
        pieces, m, n = [], 0, 0
        for rows, columns in zip(self.q, self.k, strict=True):
            low = -UNBOUNDED if self.left < 0 else columns - rows - self.left
            high = UNBOUNDED if self.right < 0 else columns - rows + self.right
            pieces.append(Piece(m, m + rows, n, n + columns, low, high))
            m, n = m + rows, n + columns
        return tuple(pieces)

    @property
    def causal(self) -> bool:
        """Whether each sequence is causal, aligned at the lower right corner."""
        return (self.left, self.right) == (-1, 0)


@dataclass(eq=False)  # not frozen: plans make one for every tile, and frozen ones take three times as long
class Pattern:
    """The mask of a tile of M query rows x N key rows. Compared by identity, and never changed.

    Row m sees column n iff low <= n - m <= high (None: unbounded). `parts`, `packed` and `fixed_table`
    replace this rule.
    """

    shape: Final[tuple[int, int]]
    """(M, N)."""
    low: Final[int | None] = None
    high: Final[int | None] = None
    parts: Final[tuple[Piece, ...]] = ()
    """Disjoint, in rows and columns of the tile."""
    fixed_table: Final[Tensor | None] = None
    """Bool [M, N]: row m sees column n iff it is True there."""
    packed: Final[Packed | None] = None
    """Packed sequences, instead of parts."""

    @classmethod
    def from_table(cls, table: Tensor) -> Pattern:
        """Return the pattern in which row m sees column n iff table[m, n]."""
        return cls((table.shape[0], table.shape[1]), fixed_table=table)

    @cached_property
    def kernel_cache(self) -> dict[Any, Any]:
        """Kernels' forms of the pattern on a device, cached with the pattern."""
        return {}

    @cached_property
    def masked(self) -> bool:
        """Whether the pattern is neither full, nor causal, nor a window."""
        return bool(self.parts or self.packed) or self.fixed_table is not None

    @property
    def full(self) -> bool:
        """Whether every row sees every column."""
        return self.low is self.high is None and not self.masked

    @cached_property
    def causal(self) -> bool:
        """Whether row m sees exactly the columns n <= m."""
        return self.low is None and self.high == 0 and not self.masked

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts or sequences, or else the band as one piece; without meaning for a `fixed_table`."""
        if self.packed is not None:
            return self.packed.pieces
        low = -UNBOUNDED if self.low is None else self.low
        high = UNBOUNDED if self.high is None else self.high
        return self.parts or (Piece(0, self.shape[0], 0, self.shape[1], low, high),)

    @property
    def pairs(self) -> int:
        """The number of attending query-key pairs."""
        if self.fixed_table is not None:
            return int(self.fixed_table.sum())
        bands = [(len(q), len(k), low, high) for each in self.pieces for q, k, low, high in each.residues()]
        return int(band_pairs_of(*torch.tensor(bands).view(-1, 4).unbind(1)).sum())

    @cached_property
    def table(self) -> Tensor:
        """Bool [M, N], True where a row sees a column; on the CPU, or on the device of `fixed_table`."""
        if self.fixed_table is not None:
            return self.fixed_table
        allowed = torch.zeros(self.shape, dtype=torch.bool)
        for part in self.pieces:
            distance = torch.arange(part.n1 - part.n0)[None, :] - torch.arange(part.m1 - part.m0)[:, None]
            inside = (distance >= part.low) & (distance <= part.high)
            if part.step > 1:
                inside &= (distance - part.shift) % part.step == 0
            allowed[part.m0 : part.m1, part.n0 : part.n1] |= inside
        return allowed

    def table_on(self, device: torch.device) -> Tensor:
        """Return `table` on a device, and keep it."""
        if device not in self.kernel_cache:
            self.kernel_cache[device] = self.table.to(device)
        table: Tensor = self.kernel_cache[device]
        return table
