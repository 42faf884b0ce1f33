"""The rows that stay at a rank while bundles travel past: its own, and on a mesh those of its column.

Staying rows go to the other positions of a column; shares of their results come back, and add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import torch

from burst_mcore.attention.geometry.rows import Rows, count, gather
from burst_mcore.attention.numerics.merge import AnySums, Held
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.executor import Bundle, Exchange
from burst_mcore.attention.schedule.actions import Kind, Pack, Unpack


class Column(Generic[AnySums]):
    """The residents of a rank in one pass: rows that stay here, and the sums of their results.

    Args:
        positions: those of the column, by member; one alone without a mesh.
        position: that of the rank.
        own: its own rows.
        sums: makes the sums of rows that move in, of (their tensors, the rows).
        dtype: that of results that go back to another rank.
    """

    def __init__(
        self,
        positions: Sequence[int],
        position: int,
        own: Held[AnySums],
        sums: Callable[[Bundle, Rows | None], AnySums],
        dtype: torch.dtype,
        lease: Lease,
    ) -> None:
        self._positions, self._sums = positions, sums
        self.own, self.dtype, self.lease = own, dtype, lease
        self.residents = {position: own}
        """By the position that owns them."""

    @property
    def exchanges(self) -> dict[Kind, Exchange]:
        """The exchanges along the column."""
        return (
            {Kind.RESIDENT: _Residents(self), Kind.SHARE: _Shares(self)} if len(self._positions) > 1 else {}
        )

    def move_in(self, member: int, rows: Rows | None, bundle: Bundle) -> None:
        """Let rows of a member of the column stay here."""
        self.residents[self._positions[member]] = Held(rows, bundle, self._sums(bundle, rows))

    def move_out(self, member: int) -> AnySums:
        """Return the results of a member's rows, which do not stay any longer."""
        return self.residents.pop(self._positions[member]).sums


class _Residents:
    """Staying rows of one position -> the other positions of its column."""

    def __init__(self, column: Column[AnySums]) -> None:
        self._column = column

    def pack(self, action: Pack) -> Bundle:
        own = self._column.own.bundle
        if action.rows is None:
            return tuple(x.contiguous() for x in own)
        return tuple(gather(x, action.rows).contiguous() for x in own)

    def empty(self, rows: Rows | None) -> Bundle:
        return room_like(self._column.lease, self._column.own.bundle, rows)

    def unpack(self, action: Unpack, parcel: Bundle | None) -> None:
        assert parcel is not None
        self._column.move_in(action.member, action.rows, parcel)


class _Shares:
    """Results that one position has for the staying rows of another -> that position, where they add up."""

    def __init__(self, column: Column[AnySums]) -> None:
        self._column = column

    def pack(self, action: Pack) -> Bundle:
        parcel = self.empty(action.rows)
        self._column.move_out(action.member).put(range(parcel[0].shape[1]), parcel)
        return parcel

    def empty(self, rows: Rows | None) -> Bundle:
        """Return room that no lease takes back: a result may be the share itself."""
        own = self._column.own
        many = own.bundle[0].shape[1] if rows is None else count(rows)
        return own.sums.room(self._column.dtype, many)

    def unpack(self, action: Unpack, parcel: Bundle | None) -> None:
        assert parcel is not None
        rows = (range(parcel[0].shape[1]),) if action.rows is None else action.rows
        self._column.own.sums.take(rows, parcel)
