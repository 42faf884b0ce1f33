"""The tensors of a mesh's columns: staying rows go to the other positions, shares of results come back."""

from __future__ import annotations

from collections.abc import Callable

from burst_mcore.attention.geometry.rows import Rows, gather
from burst_mcore.attention.runtime.buffers import Lease, room_like
from burst_mcore.attention.runtime.executor import Bundle
from burst_mcore.attention.schedule.actions import Pack, Unpack


class Residents:
    """Staying rows of one position -> the other positions of its column.

    Args:
        own: the tensors of the own staying rows.
        arrived: a function that takes (member of the column, its rows that came, their tensors).
    """

    def __init__(
        self, own: Bundle, arrived: Callable[[int, Rows | None, Bundle], None], lease: Lease
    ) -> None:
        self._own, self._arrived, self._lease = own, arrived, lease

    def pack(self, action: Pack) -> Bundle:
        if action.rows is None:
            return tuple(x.contiguous() for x in self._own)
        return tuple(gather(x, action.rows).contiguous() for x in self._own)

    def empty(self, rows: Rows | None) -> Bundle:
        return room_like(self._lease, self._own, rows)

    def unpack(self, action: Unpack, parcel: Bundle | None) -> None:
        assert parcel is not None
        self._arrived(action.member, action.rows, parcel)


class Shares:
    """Results that one position has for the staying rows of another -> that position, where they add up.

    Args:
        room: a function that makes room for results of some own rows (None: all). No lease may take the room
            back: a result may be the share itself.
        share: a function that writes the share of a member into tensors.
        add: a function that adds a share of these own rows; it may keep the tensors.
    """

    def __init__(
        self,
        room: Callable[[Rows | None], Bundle],
        share: Callable[[int, Bundle], None],
        add: Callable[[Rows, Bundle], None],
    ) -> None:
        self._share, self._add = share, add
        self.empty = room

    def pack(self, action: Pack) -> Bundle:
        parcel = self.empty(action.rows)
        self._share(action.member, parcel)
        return parcel

    def unpack(self, action: Unpack, parcel: Bundle | None) -> None:
        assert parcel is not None
        rows = (range(parcel[0].shape[1]),) if action.rows is None else action.rows
        self._add(rows, parcel)
