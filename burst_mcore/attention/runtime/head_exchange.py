"""The all-to-all of head x ring (Ulysses): h ranks pool their tokens, and each attends with 1/h of the heads.

Outside, a rank has its own rows of all heads; inside the ring, the pooled rows of its head group and its own
heads. Tensors are [B, S, H, D], D and LSE are [B, H, S]; B batch, S rows, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_mcore.attention.geometry.rows import Rows, axis, strided
from burst_mcore.attention.runtime.buffers import Lease
from burst_mcore.attention.runtime.executor import Buffer
from burst_mcore.attention.schedule.actions import Pack, Unpack
from burst_mcore.attention.schedule.heads import share_of_heads


@dataclass(frozen=True)
class HeadGroup:
    """The ranks that share heads, seen from one member."""

    member: int
    rows: tuple[Rows, ...]
    """The places of each member's rows among the pooled rows."""

    @property
    def size(self) -> int:
        return len(self.rows)

    def share(self, block: Buffer, member: int) -> Buffer:
        """Return views of these tensors with the heads of a member."""
        heads = (share_of_heads(_heads(x), member, self.size) for x in block)
        return tuple(
            x.narrow(_heads_axis(x), share.start, len(share)) for x, share in zip(block, heads, strict=True)
        )


class Inward:
    """Own rows of all heads -> pooled rows of own heads."""

    def __init__(self, group: HeadGroup, local: Buffer, pooled: Buffer, lease: Lease) -> None:
        self._group, self._local, self._lease = group, local, lease
        self.pooled = pooled

    def pack(self, action: Pack) -> Buffer:
        pieces = self._group.share(self._local, action.member)
        parcel = self.empty()
        for to, piece in zip(_opened(parcel, pieces), pieces, strict=True):
            to.copy_(piece)
        return parcel

    def empty(self) -> Buffer:
        return _parcel(self._group.share(self._local, self._group.member), self._lease)

    def unpack(self, action: Unpack, parcel: Buffer | None) -> None:
        pieces = self._group.share(self._local, self._group.member)
        for pooled, piece in zip(self.pooled, _opened(parcel, pieces) if parcel else pieces, strict=True):
            start = 0
            for rows in self._group.rows[action.member]:
                strided(pooled, rows).copy_(strided(piece, range(start, start + len(rows))))
                start += len(rows)


class Outward:
    """Pooled rows of own heads -> own rows of all heads; members that share a K/V head sum their results.

    Args:
        results: a function that writes some rows of the complete pooled results to tensors of any dtypes.
        local: the tensors for the results; zeros where members share a head. Their dtype is the message's.
    """

    def __init__(
        self, group: HeadGroup, results: Callable[[range, Buffer], None], local: Buffer, lease: Lease
    ) -> None:
        self._group, self._results, self._lease = group, results, lease
        self.local = local

    def pack(self, action: Pack | Unpack) -> Buffer:
        parcel = self.empty()
        pieces, start = _opened(parcel, self._group.share(self.local, action.member)), 0
        for rows in self._group.rows[action.member]:
            self._results(rows, tuple(strided(piece, range(start, start + len(rows))) for piece in pieces))
            start += len(rows)
        return parcel

    def empty(self) -> Buffer:
        return _parcel(self._group.share(self.local, self._group.member), self._lease)

    def unpack(self, action: Unpack, parcel: Buffer | None) -> None:
        places = self._group.share(self.local, action.member)
        pieces = _opened(parcel or self.pack(action), places)
        for x, to, piece in zip(self.local, places, pieces, strict=True):
            if _heads(x) < self._group.size:
                to.add_(piece)
            else:
                to.copy_(piece)


def _parcel(pieces: Buffer, lease: Lease) -> Buffer:
    """Return an uninitialised message of bytes with room for these tensors."""
    size = sum(x.numel() * x.itemsize for x in pieces)
    return (lease.empty((size,), torch.uint8, pieces[0].device),)


def _opened(parcel: Buffer, like: Buffer) -> Buffer:
    """Return the tensors in a parcel. The widest dtypes come first, so that all tensors are aligned."""
    (whole,), start = parcel, 0
    tensors: dict[int, Tensor] = {}
    for index, x in sorted(enumerate(like), key=lambda each: -each[1].itemsize):
        size = x.numel() * x.itemsize
        tensors[index] = whole[start : start + size].view(x.dtype).view(x.shape)
        start += size
    return tuple(tensors[index] for index in range(len(like)))


def pooled_like(x: Tensor, group: HeadGroup) -> torch.Size:
    """Return the shape inside the ring of a tensor like `x` outside."""
    shape = list(x.shape)
    shape[axis(x)] *= group.size
    shape[_heads_axis(x)] = len(share_of_heads(_heads(x), 0, group.size))
    return torch.Size(shape)


def _heads_axis(x: Tensor) -> int:
    return 2 if x.dim() == 4 else 1


def _heads(x: Tensor) -> int:
    return x.shape[_heads_axis(x)]
