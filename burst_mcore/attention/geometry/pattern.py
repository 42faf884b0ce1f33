"""The mask pattern of one tile, and which patterns a kernel supports."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_mcore.attention.geometry.piece import Piece


class Abilities(NamedTuple):
    """What a kernel takes besides full and causal tiles."""

    windows: bool = False
    """Row m sees column n iff low <= n - m <= high."""
    masks: bool = False
    """Any pattern, as a table of rows x columns."""
    pieces: bool = False
    """Any pattern, as pieces; what they leave empty costs nothing."""


NONE = Abilities()


@dataclass(frozen=True, eq=False)
class Seen:
    """Which of N key rows each of M query rows sees. Compared by identity.

    Row m sees column n iff low <= n - m <= high (None: unbounded); or, with `parts`, as those say.
    """

    shape: tuple[int, int]
    """(M, N)."""
    low: int | None = None
    high: int | None = None
    parts: tuple[Piece, ...] = ()
    """Disjoint, in rows and columns of the tile."""
    given: Tensor | None = None
    """The pattern itself, bool [M, N]."""
    made: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What kernels made of it for a device, kept as long as it is."""

    @classmethod
    def by(cls, table: Tensor) -> Seen:
        """Row m sees column n iff table[m, n]."""
        return cls((table.shape[0], table.shape[1]), given=table)

    @property
    def masked(self) -> bool:
        """Whether it is neither full, nor causal, nor a window."""
        return bool(self.parts) or self.given is not None

    @property
    def causal(self) -> bool:
        """Row m sees columns n <= m."""
        return self.low is None and self.high == 0 and not self.masked

    @property
    def windowed(self) -> bool:
        """A window, which is not causal."""
        return not (self.masked or self.causal or self.low is self.high is None)

    @cached_property
    def table(self) -> Tensor:
        """Bool [M, N], True where seen, on the CPU unless given elsewhere."""
        if self.given is not None:
            return self.given
        rows, columns = self.shape
        if not self.parts:
            ahead = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
            seen = torch.ones_like(ahead, dtype=torch.bool)
            seen = seen if self.low is None else seen & (ahead >= self.low)
            return seen if self.high is None else seen & (ahead <= self.high)
        allowed = torch.zeros(self.shape, dtype=torch.bool)
        for part in self.parts:
            ahead = torch.arange(part.n1 - part.n0)[None, :] - torch.arange(part.m1 - part.m0)[:, None]
            inside = (ahead >= part.low) & (ahead <= part.high)
            if part.step > 1:
                inside &= (ahead - part.shift) % part.step == 0
            allowed[part.m0 : part.m1, part.n0 : part.n1] |= inside
        return allowed

    def table_on(self, device: torch.device) -> Tensor:
        """`table` on this device, kept."""
        if device not in self.made:
            self.made[device] = self.table.to(device)
        table: Tensor = self.made[device]
        return table
