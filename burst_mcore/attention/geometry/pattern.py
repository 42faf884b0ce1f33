"""The mask pattern of one tile, and the patterns that a kernel supports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.piece import Piece
from burst_mcore.mask.bands import UNBOUNDED


class Abilities(NamedTuple):
    """The patterns that a kernel supports besides full and causal ones."""

    windows: bool = False
    """Row m sees column n iff low <= n - m <= high."""
    masks: bool = False
    """Any pattern, as a table of rows x columns. A kernel that adds minus infinity to scores lets NaN pass
    between documents: wrap such a kernel in `kernels.finite.keeps_nan_where_seen`."""
    pieces: bool = False
    """Any pattern, as pieces; pairs outside them cost nothing."""
    packed: bool = False
    """Diagonals one after another, each a sequence of its own (`Packed`), in one call; windows too."""


NONE = Abilities()


class Packed(NamedTuple):
    """Sequences one after another: query i of each sees keys of the same sequence alone.

    Of a sequence of M queries and N keys, query m sees key n iff -left <= n - m - (N - M) <= right, as flash
    kernels count: from the lower right corner; -1 stands for no bound.
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
        """The last query of each sequence sees all keys, and each before it one key less."""
        return (self.left, self.right) == (-1, 0)


@dataclass(eq=False)  # not frozen: plans make one for every tile, and frozen ones take three times as long
class Pattern:
    """Which of N key rows each of M query rows sees. Compared by identity, and never changed.

    Row m sees column n iff low <= n - m <= high (None: unbounded). With `parts`, those say so instead; with
    `fixed_table`, the table does.
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
    """Instead of parts: sequences one after another."""

    @classmethod
    def from_table(cls, table: Tensor) -> Pattern:
        """Return the pattern in which row m sees column n iff table[m, n]."""
        return cls((table.shape[0], table.shape[1]), fixed_table=table)

    @cached_property
    def kernel_cache(self) -> dict[Any, Any]:
        """Forms of the pattern that kernels made for a device, kept for as long as the pattern lives."""
        return {}

    @cached_property
    def masked(self) -> bool:
        """Whether the pattern is neither full, nor causal, nor a window."""
        return bool(self.parts or self.packed) or self.fixed_table is not None

    @property
    def full(self) -> bool:
        """Every row sees every column."""
        return self.low is self.high is None and not self.masked

    @cached_property
    def causal(self) -> bool:
        """Row m sees columns n <= m."""
        return self.low is None and self.high == 0 and not self.masked

    @property
    def windowed(self) -> bool:
        """A window, which is not causal."""
        return not (self.masked or self.causal or self.full)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts or sequences, or else the whole band as one; not of a `fixed_table`."""
        if self.packed is not None:
            return self.packed.pieces
        low = -UNBOUNDED if self.low is None else self.low
        high = UNBOUNDED if self.high is None else self.high
        return self.parts or (Piece(0, self.shape[0], 0, self.shape[1], low, high),)

    @property
    def pairs(self) -> int:
        """Query-key pairs that meet."""
        if self.fixed_table is not None:
            return int(self.fixed_table.sum())
        return sum(piece.pairs for piece in self.pieces)

    @cached_property
    def table(self) -> Tensor:
        """Bool [M, N], True where a row sees a column; on the CPU, or on the device of `fixed_table`."""
        if self.fixed_table is not None:
            return self.fixed_table
        allowed = torch.zeros(self.shape, dtype=torch.bool)
        for part in self.pieces:
            ahead = torch.arange(part.n1 - part.n0)[None, :] - torch.arange(part.m1 - part.m0)[:, None]
            inside = (ahead >= part.low) & (ahead <= part.high)
            if part.step > 1:
                inside &= (ahead - part.shift) % part.step == 0
            allowed[part.m0 : part.m1, part.n0 : part.n1] |= inside
        return allowed

    def table_on(self, device: torch.device) -> Tensor:
        """Return `table` on a device, and keep it."""
        if device not in self.kernel_cache:
            self.kernel_cache[device] = self.table.to(device)
        table: Tensor = self.kernel_cache[device]
        return table
