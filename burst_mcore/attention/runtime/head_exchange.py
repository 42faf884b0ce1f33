"""The all-to-all of head x ring: h ranks pool their tokens, and each attends with a share of the heads.

Outside, a rank has its own rows of all heads; inside the ring, the pooled rows of its head group and its own
heads. Tensors are [B, S, H, D], statistics [B, H, S]; B batch, S rows, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_mcore.attention.runtime.buffers import Lease
from burst_mcore.attention.runtime.executor import Bundle

Rows = tuple[range, ...]


def share_of_heads(total: int, member: int, size: int) -> range:
    """The heads of `total` that a member of a head group of `size` attends with.

    Where there are fewer K/V heads than members, several members get the same one: no more than is needed.
    """
    first = member * total // size
    return range(first, max(first + 1, (member + 1) * total // size))


def why_not_heads(heads: int, kv_heads: int, degree: int) -> str | None:
    """Why so many ranks cannot share these heads; None if they can."""
    if heads % degree:
        return f"{heads} heads do not divide by {degree}"
    if kv_heads % degree and degree % kv_heads:
        return f"{kv_heads} K/V heads and {degree} do not divide one another"
    return None


@dataclass(frozen=True)
class HeadGroup:
    """The ranks that share heads: which rows each brings, seen from one of them."""

    member: int
    rows: tuple[Rows, ...]
    """By member: where its rows lie among the pooled."""

    @property
    def size(self) -> int:
        return len(self.rows)

    def share(self, bundle: Bundle, member: int) -> Bundle:
        """Of these tensors the heads that a member attends with."""
        heads = (share_of_heads(_count(x), member, self.size) for x in bundle)
        return tuple(x.narrow(_axes(x)[1], of.start, len(of)) for x, of in zip(bundle, heads, strict=True))


class Inward:
    """Own rows of all heads -> pooled rows of own heads."""

    def __init__(self, group: HeadGroup, own: Bundle, pooled: Bundle, lease: Lease) -> None:
        self._group, self._own, self._lease = group, own, lease
        self.pooled = pooled

    def pack(self, member: int) -> Bundle:
        pieces = self._group.share(self._own, member)
        parcel = self.empty()
        for to, piece in zip(_opened(parcel, pieces), pieces, strict=True):
            to.copy_(piece)
        return parcel

    def empty(self) -> Bundle:
        return _parcel(self._group.share(self._own, self._group.member), self._lease)

    def unpack(self, member: int, parcel: Bundle | None) -> None:
        pieces = self._group.share(self._own, self._group.member)
        for pooled, came in zip(self.pooled, _opened(parcel, pieces) if parcel else pieces, strict=True):
            at = 0
            for rows in self._group.rows[member]:
                _rows(pooled, rows).copy_(_rows(came, range(at, at + len(rows))))
                at += len(rows)


class Outward:
    """Pooled rows of own heads -> own rows of all heads. Shares of one head, from several members, add up.

    Args:
        results: (rows) -> those rows of the pooled results, complete.
        own: where they go; zeros where shares add up. They travel in its dtype.
    """

    def __init__(
        self,
        group: HeadGroup,
        results: Callable[[range], Bundle],
        own: Bundle,
        lease: Lease,
    ) -> None:
        self._group, self._results, self._lease = group, results, lease
        self.own = own

    def pack(self, member: int) -> Bundle:
        parcel = self.empty()
        pieces, at = _opened(parcel, self._group.share(self.own, member)), 0
        for rows in self._group.rows[member]:
            for piece, result in zip(pieces, self._results(rows), strict=True):
                _rows(piece, range(at, at + len(rows))).copy_(result)
            at += len(rows)
        return parcel

    def empty(self) -> Bundle:
        return _parcel(self._group.share(self.own, self._group.member), self._lease)

    def unpack(self, member: int, parcel: Bundle | None) -> None:
        places = self._group.share(self.own, member)
        pieces = _opened(parcel or self.pack(member), places)
        for own, to, came in zip(self.own, places, pieces, strict=True):
            if _count(own) < self._group.size:
                to.add_(came)
            else:
                to.copy_(came)


def _parcel(pieces: Bundle, lease: Lease) -> Bundle:
    """Room for these tensors, uninitialised, as one message: bytes."""
    size = sum(x.numel() * x.itemsize for x in pieces)
    return (lease.empty((size,), torch.uint8, pieces[0].device),)


def _opened(parcel: Bundle, like: Bundle) -> Bundle:
    """The tensors in a parcel: the widest dtypes come first, so that all lie as their dtype must."""
    (whole,), at = parcel, 0
    found: dict[int, Tensor] = {}
    for index, x in sorted(enumerate(like), key=lambda each: -each[1].itemsize):
        size = x.numel() * x.itemsize
        found[index] = whole[at : at + size].view(x.dtype).view(x.shape)
        at += size
    return tuple(found[index] for index in range(len(like)))


def pooled_like(x: Tensor, group: HeadGroup) -> torch.Size:
    """The shape, inside the ring, of a tensor that is `x` outside."""
    shape = list(x.shape)
    rows_at, heads_at = _axes(x)
    shape[rows_at] *= group.size
    shape[heads_at] = len(share_of_heads(shape[heads_at], 0, group.size))
    return torch.Size(shape)


def _axes(x: Tensor) -> tuple[int, int]:
    """(rows, heads) of a tensor, or of a statistic."""
    return (1, 2) if x.dim() == 4 else (2, 1)


def _count(x: Tensor) -> int:
    return x.shape[_axes(x)[1]]


def _rows(x: Tensor, rows: range) -> Tensor:
    return x.narrow(_axes(x)[0], rows.start, len(rows))
