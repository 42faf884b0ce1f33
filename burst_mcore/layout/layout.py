"""Which token of the global sequence sits on which rank: pure functions of (rank, size).

A rank's share of a sequence of n tokens is a tuple of *runs*, `range` objects of global positions, in
ascending order, which is the order in which the rank stores them. Everything else (positions, shard, unshard,
the attention plan) reads the runs, so a new layout is one more case in `Layout.runs`.

A sequence whose length does not divide is dealt as if it were longer: the ranks that hold its last positions
have fewer tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from burst_mcore.layout.balance import layout_for
from burst_mcore.mask import Mask

KINDS = ("contiguous", "zigzag", "stacked-zigzag", "striped", "block-striped", "chunks", "zigzag-documents")
NAMES = "contiguous, zigzag, striped, stacked-zigzag:K (K times 2G chunks), block-striped:B (blocks of B)"
"""How a layout is written as a word."""


@dataclass(frozen=True)
class Layout:
    """How a sequence is dealt over the G ranks of a ring.

    contiguous: rank r holds the r-th of G equal chunks.
    zigzag: the sequence is cut into 2G chunks and rank r holds chunks r and 2G-1-r, so that under a causal
    mask every rank has the same work. It is Megatron-Core's layout for context parallelism.
    stacked-zigzag: the sequence is cut into `stacks` pieces, each dealt zigzag.
    striped: rank r holds every G-th token, from r on.
    block-striped: each block of `block` tokens is cut into G pieces, and rank r holds the r-th of each (the
    paper's balance for block-wise sparse masks).
    chunks: the sequence is cut into equal chunks, and `chunks[r]` are those of rank r: see `for_mask`.
    zigzag-documents: each document of a packed sequence is dealt zigzag (Megatron-Core's layout for packed
    sequences). Documents must be multiples of 2G tokens.

    Raises ValueError where a field is not legal.
    """

    kind: str = "zigzag"
    stacks: int = 1
    """Of stacked-zigzag."""
    block: int = 0
    """Tokens of a block of block-striped; a multiple of the number of ranks."""
    chunks: tuple[tuple[int, ...], ...] = ()
    ends: tuple[int, ...] = ()
    """Of zigzag-documents: where the documents begin, from 0, and the end of the sequence (cu_seqlens)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown layout {self.kind!r}; legal: {NAMES}")
        for name, of, least in (("stacks", "stacked-zigzag", 1), ("block", "block-striped", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} of a layout must be a number, got {value!r}")
            if self.kind == of and value < least:
                raise ValueError(f"layout {of} needs {name} >= {least}, as in {of}:{max(least, 64)}")
            if self.kind != of and value != Layout.__dataclass_fields__[name].default:
                raise ValueError(f"{name} is for layout {of} only, got {name}={value} with {self.kind}")
        object.__setattr__(self, "chunks", _checked_chunks(self.chunks))
        object.__setattr__(self, "ends", _checked_ends(self.ends))
        if (self.kind == "chunks") != bool(self.chunks):
            raise ValueError("layout chunks, and no other, needs the chunks of each rank")
        if (self.kind == "zigzag-documents") != bool(self.ends):
            raise ValueError("layout zigzag-documents, and no other, needs the ends of the documents")

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value for name, value in self.__dict__.items() if not name.startswith("_")
        }  # hashes are of a process

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.stacks, self.block, self.chunks, self.ends))

    @classmethod
    def of(cls, layout: Layout | str) -> Layout:
        """A layout from itself or from its word: "zigzag", "stacked-zigzag:4", "block-striped:128", ...

        Raises:
            ValueError: for anything else.
        """
        if isinstance(layout, Layout):
            return layout
        if not isinstance(layout, str):
            raise ValueError(f"layout must be a Layout or a word ({NAMES}), got {layout!r}")
        kind, _, number = layout.partition(":")
        parameter = {"stacked-zigzag": "stacks", "block-striped": "block"}.get(kind)
        if kind == "stacked-zigzag" and not number:
            number = "2"
        if not number and parameter is None:
            return cls(kind)
        if parameter is None or not number.isdigit():
            raise ValueError(f"unknown layout {layout!r}; legal: {NAMES}")
        return cls(kind, stacks=int(number)) if parameter == "stacks" else cls(kind, block=int(number))

    @classmethod
    def for_mask(cls, mask: Mask, n: int, size: int) -> Layout:
        """The layout that balances `mask` over n tokens and `size` ranks, and moves little.

        The first of contiguous, zigzag, stacked zigzag, chunks dealt one by one to the rank with the least
        work, finer and finer, and striped under which the busiest rank has at most 1.05 times the mean work
        (1.10 for a window alone), on the side of the queries and on that of the keys; where none does, the
        most balanced: see `burst_mcore.layout.balance`.

        Raises:
            ValueError: the mask does not go with n tokens, or size is not a number of ranks.
        """
        found: Layout = layout_for(mask, n, size, cls)  # type: ignore[arg-type]  # a class is hashable
        return found

    def __str__(self) -> str:
        return self._word

    @cached_property
    def _word(self) -> str:
        if self.kind == "stacked-zigzag":
            return f"{self.kind}:{self.stacks}"
        if self.kind == "block-striped":
            return f"{self.kind}:{self.block}"
        if self.kind == "chunks":
            return f"chunks({len(self.chunks)} x {len(self.chunks[0])}, #{_digest(self.chunks)})"
        if self.kind == "zigzag-documents":
            return f"zigzag-documents({len(self.ends) - 1}, #{_digest(self.ends)})"
        return self.kind

    def divisor(self, size: int) -> int:
        """What the padded sequence length is a multiple of, on a ring of `size` ranks.

        Raises:
            ValueError: the layout does not go with so many ranks.
        """
        return _divisor(self, size)

    def padded(self, n: int, size: int) -> int:
        """The length that a sequence of n tokens is dealt as: the next multiple of `divisor`.

        Raises:
            ValueError: as `divisor`; or n < 1.
        """
        if n < 1:
            raise ValueError(f"a sequence has at least one token, got n={n}")
        divisor = self.divisor(size)
        if self.ends and n != divisor:
            raise ValueError(
                f"the documents of layout {self} end at {divisor}, but the sequence has {n} tokens"
            )
        return -(-n // divisor) * divisor

    def runs(self, n: int, rank: int, size: int) -> tuple[range, ...]:
        """Global positions of `rank`, ascending, as ranges; of the padded sequence, so some may be >= n.

        Raises:
            ValueError: rank outside the ring, or as `padded`.
        """
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, size) with size >= 1, got rank {rank} of size {size}")
        n = self.padded(n, size)
        if size == 1:
            return (range(n),)
        if self.kind == "striped":
            return (range(rank, n, size),)
        if self.kind == "zigzag-documents":
            return joined(
                [
                    range(start + chunk * length, start + (chunk + 1) * length)
                    for start, stop in pairwise(self.ends)
                    for length in [(stop - start) // (2 * size)]
                    for chunk in (rank, 2 * size - 1 - rank)
                    if length
                ]
            )
        chunks = self._chunks(n, rank, size)
        length = n // size // len(chunks)
        return joined([range(chunk * length, (chunk + 1) * length) for chunk in chunks])

    def run_table(self, n: int, size: int) -> Tensor:
        """The runs of all ranks at once, int64 [runs, 4]: rank, start, stop, step; ordered by rank and start.

        Raises:
            ValueError: as `padded`.
        """
        n = self.padded(n, size)
        ranks = torch.arange(size)[:, None]
        chunks = self.chunk_table(n, size)
        if chunks is not None:
            start = chunks.sort(1).values * (n // chunks.numel())
            return _joined_table(ranks.expand_as(start), start, start + n // chunks.numel())
        if size == 1 or self.kind == "striped":
            table = [ranks, ranks, torch.full_like(ranks, n), torch.full_like(ranks, size)]
            return torch.cat(table, 1)
        ends = torch.tensor(self.ends)
        length = (ends.diff() // (2 * size))[None, :, None]
        of_document = torch.stack([ranks, 2 * size - 1 - ranks], 2)  # [size, 1, 2]: its two chunks
        start = (ends[None, :-1, None] + of_document * length).flatten(1)
        stop = start + length.expand(size, -1, 2).flatten(1)
        return _joined_table(ranks.expand_as(start), start, stop)

    def chunk_table(self, n: int, size: int) -> Tensor | None:
        """Which of the equal chunks of the padded sequence each rank holds, int64 [size, chunks of a rank].

        None where a layout does not deal equal chunks.
        """
        if size == 1 or self.kind in ("striped", "zigzag-documents"):
            return None
        n = self.padded(n, size)
        ranks = torch.arange(size)[:, None]
        if self.kind == "chunks":
            return torch.tensor(self.chunks)
        if self.kind == "contiguous":
            return ranks
        if self.kind == "block-striped":
            return ranks + torch.arange(n // self.block)[None] * size
        stacks = torch.arange(self.stacks)[None, :, None] * 2 * size
        return (stacks + torch.stack([ranks, 2 * size - 1 - ranks], 2)).flatten(1)

    def _chunks(self, n: int, rank: int, size: int) -> Sequence[int]:
        """Which of the equal chunks of the sequence `rank` holds, in order."""
        if self.kind == "chunks":
            return self.chunks[rank]
        if self.kind == "contiguous":
            return (rank,)
        if self.kind == "block-striped":
            return range(rank, n // self.block * size, size)
        stacks = range(0, 2 * size * self.stacks, 2 * size)
        return [chunk for stack in stacks for chunk in (stack + rank, stack + 2 * size - 1 - rank)]


def _checked_chunks(chunks: Any) -> tuple[tuple[int, ...], ...]:
    try:
        dealt = tuple(tuple(sorted(int(chunk) for chunk in of_rank)) for of_rank in chunks)
    except TypeError:
        raise ValueError(f"chunks must be the numbers of the chunks of each rank, got {chunks!r}") from None
    every = sorted(chunk for of_rank in dealt for chunk in of_rank)
    if every != list(range(len(every))) or len({len(of_rank) for of_rank in dealt}) > 1 or () in dealt:
        raise ValueError("chunks must deal every chunk to one rank, and as many to each rank, at least one")
    return dealt


def _checked_ends(ends: Any) -> tuple[int, ...]:
    """cu_seqlens, a list or a tensor, as a tuple without empty documents."""
    try:
        given = [int(end) for end in (ends.tolist() if isinstance(ends, Tensor) else ends)]
    except TypeError:
        raise ValueError(f"ends of documents must be a list of numbers (cu_seqlens), got {ends!r}") from None
    if given and (given[0] != 0 or given != sorted(given) or given[-1] == 0):
        raise ValueError(f"ends of documents must ascend from 0, got {given[:8]}")
    return tuple(dict.fromkeys(given))


@lru_cache(maxsize=1024)
def _divisor(layout: Layout, size: int) -> int:
    if layout.kind == "block-striped" and layout.block % size:
        raise ValueError(
            f"layout {layout} deals each block over the {size} ranks: the block must be a multiple of {size}"
        )
    if layout.kind == "chunks" and len(layout.chunks) != size:
        raise ValueError(f"layout {layout} is for {len(layout.chunks)} ranks, not for {size}")
    if layout.ends and size > 1 and (odd := [end for end in layout.ends if end % (2 * size)]):
        raise ValueError(
            f"layout zigzag-documents over {size} ranks needs documents of multiples of {2 * size} tokens; "
            f"one ends at {odd[0]}"
        )
    if layout.kind == "zigzag-documents":
        return layout.ends[-1]
    if size == 1:
        return 1
    each = {"zigzag": 2, "stacked-zigzag": 2 * layout.stacks, "chunks": len((*layout.chunks, ())[0])}
    return layout.block if layout.kind == "block-striped" else size * each.get(layout.kind, 1)


def _digest(values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=6).hexdigest()


def joined(runs: Sequence[range]) -> tuple[range, ...]:
    """The same with neighbours as one."""
    found = [runs[0]]
    for run in runs[1:]:
        if run.start == found[-1].stop:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def _joined_table(ranks: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Runs of step 1, ascending within each rank [size, runs of a rank], with neighbours as one."""
    filled = (stop > start).flatten()
    ranks, start, stop = (x.flatten()[filled] for x in (ranks, start, stop))
    begins = torch.ones_like(start, dtype=torch.bool)
    begins[1:] = (ranks[1:] != ranks[:-1]) | (start[1:] != stop[:-1])
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    return torch.stack([ranks[begins], start[begins], stop[ends], torch.ones_like(start[begins])], 1)


def positions(n: int, *, rank: int, size: int, layout: Layout | str = "zigzag") -> Tensor:
    """Global index of each row that `rank` holds, int64 [local rows], in local order.

    `n` is the length of the GLOBAL sequence in tokens. Ranks hold as many rows each if the layout's divisor
    divides n; else some hold fewer, perhaps none.

    Raises:
        ValueError: as `Layout.runs`.
    """
    runs = Layout.of(layout).runs(n, rank, size)
    held = torch.cat([torch.arange(r.start, r.stop, r.step) for r in runs])
    return held[held < n]


def shard(x: Tensor, dim: int, *, rank: int, size: int, layout: Layout | str = "zigzag") -> Tensor:
    """The rows of `x` along `dim` that `rank` holds, as a new contiguous tensor. Differentiable.

    Raises:
        ValueError: as `Layout.runs`, with n = x.shape[dim].
    """
    n = x.shape[dim]
    runs = Layout.of(layout).runs(n, rank, size)
    if any(run.step > 1 for run in runs):
        return x.index_select(dim, positions(n, rank=rank, size=size, layout=layout).to(x.device))
    held = [x.narrow(dim, r.start, min(r.stop, n) - r.start) for r in runs if r.start < n]
    return torch.cat(held or [x.narrow(dim, 0, 0)], dim=dim)


def unshard(parts: Sequence[Tensor], dim: int, *, layout: Layout | str = "zigzag") -> Tensor:
    """The global tensor from every rank's part, in rank order: the inverse of `shard`. Differentiable.

    Raises:
        ValueError: no parts, parts that differ in another dimension, or lengths that the layout cannot have
            dealt.
    """
    parts = list(parts)
    shapes = [tuple(part.shape) for part in parts]
    if not parts or len({shape[:dim] + shape[dim:][1:] for shape in shapes}) > 1:
        raise ValueError(
            f"unshard needs one part per rank, of one shape but for dim {dim}, got shapes {shapes}"
        )
    size, lengths = len(parts), [part.shape[dim] for part in parts]
    dealt = [positions(sum(lengths), rank=r, size=size, layout=layout) for r in range(size)]
    if lengths != (legal := [len(held) for held in dealt]):
        raise ValueError(
            f"layout {Layout.of(layout)} deals {sum(lengths)} tokens over {size} ranks as {legal}, got "
            f"{lengths}"
        )
    return torch.cat(parts, dim=dim).index_select(dim, torch.cat(dealt).argsort().to(parts[0].device))
