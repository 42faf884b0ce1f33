"""Which token of the global sequence sits on which rank: pure functions of (rank, size).

A rank's share of a sequence of n tokens is a tuple of *runs*, `range` objects of global positions in the
order in which the rank stores them. Everything else (positions, shard, unshard, the attention plan) reads
the runs, so a new layout is one more case in `Layout.runs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Layout:
    """How a sequence is dealt over the ranks of a ring.

    contiguous: rank r holds the r-th of G equal chunks.
    zigzag: the sequence is cut into 2G chunks and rank r holds chunks r and 2G-1-r, in that order, so that
    under a causal mask every rank has the same work. It is Megatron-Core's layout for context parallelism.
    """

    kind: str = "zigzag"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown layout {self.kind!r}; legal: {', '.join(map(repr, KINDS))}")

    @classmethod
    def of(cls, layout: Layout | str) -> Layout:
        """A layout from itself or from its shorthand, the name of its kind.

        Raises:
            ValueError: for anything else.
        """
        if isinstance(layout, Layout):
            return layout
        if isinstance(layout, str):
            return cls(layout)
        raise ValueError(f"layout must be a Layout or one of {KINDS}, got {layout!r}")

    def __str__(self) -> str:
        return self.kind

    def divisor(self, size: int) -> int:
        """What the global sequence length must be a multiple of, on a ring of `size` ranks."""
        return 2 * size if self.kind == "zigzag" and size > 1 else size

    def runs(self, n: int, rank: int, size: int) -> tuple[range, ...]:
        """Global positions held by `rank`, as ranges in local order.

        Raises:
            ValueError: rank outside the ring, or n not a positive multiple of `divisor(size)`.
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, size) with size >= 1, got rank {rank} of size {size}")
        divisor = self.divisor(size)
        if n < 1 or n % divisor:
            raise ValueError(
                f"a {self} layout over {size} ranks needs a sequence length that is a positive multiple of "
                f"{divisor}, got {n}: pad to {max(1, -(-n // divisor)) * divisor}"
            )
        if self.kind == "contiguous" or size == 1:
            length = n // size
            return (range(rank * length, (rank + 1) * length),)
        length = n // (2 * size)
        return tuple(range(c * length, (c + 1) * length) for c in (rank, 2 * size - 1 - rank))


def positions(n: int, *, rank: int, size: int, layout: Layout | str = "zigzag") -> Tensor:
    """Global index of each local row, int64 [n / size], in local order.

    `n` is the length of the GLOBAL sequence in tokens.

    Raises:
        ValueError: as `Layout.runs`.
    """
    runs = Layout.of(layout).runs(n, rank, size)
    return torch.cat([torch.arange(r.start, r.stop, r.step) for r in runs])


def shard(x: Tensor, dim: int, *, rank: int, size: int, layout: Layout | str = "zigzag") -> Tensor:
    """The rows of `x` along `dim` that `rank` holds, as a new contiguous tensor. Differentiable.

    Raises:
        ValueError: as `Layout.runs`, with n = x.shape[dim].
    """
    runs = Layout.of(layout).runs(x.shape[dim], rank, size)
    return torch.cat([x.narrow(dim, r.start, len(r)) for r in runs], dim=dim)


def unshard(parts: Sequence[Tensor], dim: int, *, layout: Layout | str = "zigzag") -> Tensor:
    """The global tensor from every rank's part, in rank order: the inverse of `shard`. Differentiable.

    Raises:
        ValueError: no parts, parts of different shapes, or lengths that the layout cannot have dealt.
    """
    parts = list(parts)
    if not parts or any(part.shape != parts[0].shape for part in parts):
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"unshard needs one part per rank, all of one shape, got shapes {shapes}")
    size, n = len(parts), len(parts) * parts[0].shape[dim]
    dealt = torch.cat([positions(n, rank=r, size=size, layout=layout) for r in range(size)])
    return torch.cat(parts, dim=dim).index_select(dim, dealt.argsort().to(parts[0].device))
