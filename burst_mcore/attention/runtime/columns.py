"""The column of a mesh: staying rows go to its other positions; shares of results come back, and add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from burst_mcore.attention.geometry.rows import Rows, count, gather
from burst_mcore.attention.numerics.merge import GradientSums, Held, OnlineSoftmax
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.executor import Bundle, Exchange
from burst_mcore.attention.schedule.actions import Kind, Pack, Unpack

Sums = TypeVar("Sums", bound=OnlineSoftmax | GradientSums)


class Column(Generic[Sums]):
    """The column of a rank in one pass over a mesh: its rows stay at all positions, and shares come back.

    Args:
        positions: those of the column, by member.
        residents: the rows that stay here, by their position; at first the own.
        sums: makes the sums of rows that move in, of (their tensors, the rows).
        dtype: that of shares.
    """

    def __init__(
        self,
        positions: Sequence[int],
        residents: dict[int, Held[Sums]],
        sums: Callable[[Bundle, Rows | None], Sums],
        dtype: torch.dtype,
        lease: Lease,
    ) -> None:
        self.positions, self.residents, self.sums = positions, residents, sums
        (self.own,) = residents.values()
        self.dtype, self.lease = dtype, lease

    @property
    def exchanges(self) -> dict[Kind, Exchange]:
        """The exchanges along the column."""
        return {Kind.RESIDENT: _Residents(self), Kind.SHARE: _Shares(self)}


class _Residents:
    """Staying rows of one position -> the other positions of its column."""

    def __init__(self, column: Column[Sums]) -> None:
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
        column, rows = self._column, action.rows
        column.residents[column.positions[action.member]] = Held(rows, parcel, column.sums(parcel, rows))


class _Shares:
    """Results that one position has for the staying rows of another -> that position, where they add up."""

    def __init__(self, column: Column[Sums]) -> None:
        self._column = column

    def pack(self, action: Pack) -> Bundle:
        parcel = self.empty(action.rows)
        column = self._column  # the member's rows do not stay any longer
        column.residents.pop(column.positions[action.member]).sums.put(range(parcel[0].shape[1]), parcel)
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
