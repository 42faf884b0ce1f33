"""The kinds of layouts, a class each: the tokens of a sequence on each rank of a ring.

A new kind is a subclass of `LayoutKind` in this file, most often of `Periodic`. Its class has a name and, for
a number in the name, a field; names of layouts, checks, pickles, plans and costs then know the kind.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from burst_mcore.words import digest

BY_WORD: dict[str, type[LayoutKind]] = {}
"""All kinds, in the order of this file."""
Runs = tuple[range, ...]
"""Ranges of global positions, in ascending order, which is the order in which a rank stores its tokens."""


def joined_table(ranks: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Return the runs of all ranks, neighbours joined, int64 [runs, 4]: rank, start, stop, step 1.

    Args:
        ranks, start, stop: int64 [ranks, runs of a rank], ascending within each rank; runs may be empty.
    """
    filled = (stop > start).flatten()
    ranks, start, stop = (x.flatten()[filled] for x in (ranks, start, stop))
    begins = torch.ones_like(start, dtype=torch.bool)
    begins[1:] = (ranks[1:] != ranks[:-1]) | (start[1:] != stop[:-1])
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    return torch.stack([ranks[begins], start[begins], stop[ends], torch.ones_like(start[begins])], 1)


@dataclass(frozen=True)
class LayoutKind:
    """A kind of sharding of a sequence over the G ranks of a ring; its fields are parameters with defaults.

    Methods get a length that `divisor` divides, and at least two ranks.
    """

    word: ClassVar[str]
    """The name under which the class is registered."""
    number: ClassVar[str] = ""
    """The field of the number (at least 1) in a name, as 128 in block-striped:128; "": no number."""
    usual: ClassVar[int | None] = None
    """The default number of a name; None: no default."""
    written: ClassVar[str] = ""
    """The syntax of the name, for errors and docs; "": a name is not enough for the kind."""
    even_everywhere: ClassVar[bool] = False
    """Whether ranks hold equally many tokens (+-1) before every position of the sequence."""
    even_at_edges: ClassVar[bool] = False
    """Whether ranks have the same causal work before each of `edges`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "word" in vars(cls):
            BY_WORD[cls.word] = cls

    def __post_init__(self) -> None:
        if not self.number:
            return
        value = getattr(self, self.number)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"layout {self.word} needs {self.number} >= 1, as {self.word}:64, got {value!r}")

    def __str__(self) -> str:
        return f"{self.word}:{getattr(self, self.number)}" if self.number else self.word

    @property
    def length(self) -> int:
        """The only legal length of sequences; 0: any length."""
        return 0

    def check(self, size: int) -> None:
        """Raise ValueError if the layout does not fit the number of ranks."""

    def divisor(self, size: int) -> int:
        """Return the divisor of padded sequence lengths."""
        raise NotImplementedError

    def chunk_table(self, n: int, size: int) -> Tensor | None:
        """Return the equal chunks of each rank, int64 [size, chunks of a rank]; None: no equal chunks."""
        return None

    def run_table(self, n: int, size: int) -> Tensor:
        """Return the runs of all ranks, int64 [runs, 4]: rank, start, stop, step; by rank, then by start.

        The runs of a rank are disjoint, and all have one step. Override if there are no equal chunks.
        """
        chunks = self.chunk_table(n, size)
        assert chunks is not None
        length = n // chunks.numel()
        start = chunks.sort(1).values * length
        return joined_table(torch.arange(size)[:, None].expand_as(start), start, start + length)

    def edges(self, n: int, size: int) -> Tensor:
        """Return the ascending edges of the layout's pieces, int64 [edges], from 0."""
        return torch.arange(0, n, n // self.divisor(size))


class Periodic(LayoutKind):
    """A kind with equal periods of the sequence, all sharded alike."""

    def places(self, rank: Tensor, size: int) -> tuple[Tensor, ...]:
        """Return the chunks of a period on each rank [ranks, 1], ascending; all ranks have equally many."""
        raise NotImplementedError

    def periods(self, n: int) -> int:
        """Return the number of periods in n tokens; if it depends on n, override `divisor`, too."""
        return 1

    def divisor(self, size: int) -> int:
        return self.periods(0) * size * len(self.places(torch.tensor(0), size))

    def chunk_table(self, n: int, size: int) -> Tensor | None:
        places = torch.cat(self.places(torch.arange(size)[:, None], size), 1)
        first = torch.arange(self.periods(n))[None, :, None] * places.numel()
        return (first + places[:, None]).flatten(1)


class Contiguous(Periodic):
    """Rank r holds the r-th of G equal chunks."""

    word = written = "contiguous"

    def places(self, rank: Tensor, size: int) -> tuple[Tensor, ...]:
        return (rank,)


class Zigzag(Periodic):
    """The sequence is cut into 2G chunks; rank r holds chunks r and 2G-1-r (BurstEngine, equation 11).

    Under a causal mask every rank has the same work: with chunks of P tokens, P = N / 2G, the queries of a
    rank see P (rP + (2G-1-r) P) + P (P+1) = P (N+1) keys. Megatron-Core's context-parallel layout.
    """

    word = written = "zigzag"

    def places(self, rank: Tensor, size: int) -> tuple[Tensor, ...]:
        return (rank, 2 * size - 1 - rank)


class Striped(LayoutKind):
    """Rank r holds every G-th token, from r on (BurstEngine, equation 13)."""

    word = written = "striped"
    even_everywhere = True

    def divisor(self, size: int) -> int:
        return size

    def run_table(self, n: int, size: int) -> Tensor:
        ranks = torch.arange(size)
        return torch.stack([ranks, ranks, torch.full_like(ranks, n), torch.full_like(ranks, size)], 1)


@dataclass(frozen=True)
class StackedZigzag(Zigzag):
    """The sequence is cut into `stacks` pieces, each sharded zigzag."""

    word, written = "stacked-zigzag", "stacked-zigzag:K (K times 2G chunks)"
    number, usual = "stacks", 2

    stacks: int = 1

    def periods(self, n: int) -> int:
        return self.stacks


@dataclass(frozen=True)
class BlockStriped(Contiguous):
    """Each block of `block` tokens, a multiple of G, is cut into G pieces; rank r holds the r-th of each.

    The paper's layout for block-wise sparse masks ("Sparse Attention Integration").
    """

    word, written = "block-striped", "block-striped:B (blocks of B)"
    number = "block"

    block: int = 0

    def check(self, size: int) -> None:
        if self.block % size:
            raise ValueError(f"layout {self} over {size} ranks: the block must be a multiple of {size}")

    def periods(self, n: int) -> int:
        return n // self.block

    def divisor(self, size: int) -> int:
        return self.block

    def edges(self, n: int, size: int) -> Tensor:
        return torch.arange(0, n, self.block)


@dataclass(frozen=True)
class Chunks(LayoutKind):
    """The sequence is cut into equal chunks; rank r holds `chunks[r]`: see `Layout.for_mask`."""

    word = "chunks"

    chunks: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", _checked_chunks(self.chunks))

    def __str__(self) -> str:
        return f"chunks({len(self.chunks)} x {len(self.chunks[0])}, #{digest(torch.tensor(self.chunks))})"

    def check(self, size: int) -> None:
        if len(self.chunks) != size:
            raise ValueError(f"layout {self} is for {len(self.chunks)} ranks, not for {size}")

    def divisor(self, size: int) -> int:
        return size * len(self.chunks[0])

    def chunk_table(self, n: int, size: int) -> Tensor | None:
        return torch.tensor(self.chunks)


@dataclass(frozen=True)
class ZigzagDocuments(LayoutKind):
    """Each document of a packed sequence is sharded zigzag: Megatron-Core's layout for packed sequences.

    `ends` are cu_seqlens, from 0 to the end of the sequence. Documents must have multiples of 2G tokens.
    """

    word = "zigzag-documents"
    even_at_edges = True

    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", _checked_ends(self.ends))

    def __str__(self) -> str:
        return f"zigzag-documents({len(self.ends) - 1}, #{digest(torch.tensor(self.ends))})"

    @property
    def length(self) -> int:
        return self.ends[-1]

    def check(self, size: int) -> None:
        if size > 1 and (illegal := [end for end in self.ends if end % (2 * size)]):
            legal = f"documents of multiples of {2 * size} tokens"
            raise ValueError(f"layout {self.word} over {size} ranks needs {legal}; one ends at {illegal[0]}")

    def divisor(self, size: int) -> int:
        return self.length

    def run_table(self, n: int, size: int) -> Tensor:
        ranks, ends = torch.arange(size)[:, None], torch.tensor(self.ends)
        length = (ends.diff() // (2 * size))[None, :, None]
        of_document = torch.stack([ranks, 2 * size - 1 - ranks], 2)  # [size, 1, 2]: its two chunks
        start = (ends[None, :-1, None] + of_document * length).flatten(1)
        stop = start + length.expand(size, -1, 2).flatten(1)
        return joined_table(ranks.expand_as(start), start, stop)

    def edges(self, n: int, size: int) -> Tensor:
        return torch.tensor(self.ends)


def kind_of(word: str, parameters: dict[str, Any]) -> LayoutKind:
    """Return the kind called `word` with its parameters; other kinds' parameters must have their defaults.

    Raises:
        ValueError: no such kind, a parameter that is not legal, or that belongs to another kind.
    """
    if word not in BY_WORD:
        raise ValueError(f"unknown layout {word!r}; legal: {NAMES}")
    names = {field.name for field in fields(BY_WORD[word])}
    for name in parameters.keys() - names:
        if name not in DEFAULTS:
            raise TypeError(f"unknown parameter {name!r} of a layout; legal: {', '.join(DEFAULTS)}")
        value = parameters[name]
        if isinstance(value, Tensor) or value != DEFAULTS[name]:
            takers = ", ".join(kind.word for kind in BY_WORD.values() if name in kind.__dataclass_fields__)
            raise ValueError(f"{name} is for layout {takers} only, got {name}={value} with {word}")
    return BY_WORD[word](**{name: value for name, value in parameters.items() if name in names})


def kind_from(text: str) -> LayoutKind:
    """Return the kind of a name such as "zigzag" or "block-striped:128".

    Raises:
        ValueError: an unknown name, or a missing or superfluous number.
    """
    word, _, number = text.partition(":")
    kind = BY_WORD.get(word)
    if kind is not None and not kind.number and text == word:
        return kind_of(word, {})
    value = number or (str(kind.usual) if kind is not None and kind.usual else "")
    if kind is None or not kind.number or not value.isdigit():
        raise ValueError(f"unknown layout {text!r}; legal: {NAMES}")
    return kind_of(word, {kind.number: int(value)})


def _checked_chunks(chunks: Any) -> tuple[tuple[int, ...], ...]:
    try:
        sharded = tuple(tuple(sorted(int(chunk) for chunk in of_rank)) for of_rank in chunks)
    except TypeError:
        raise ValueError(f"chunks must be the numbers of the chunks of each rank, got {chunks!r}") from None
    every = sorted(chunk for of_rank in sharded for chunk in of_rank)
    if every != list(range(len(every))) or len({len(of_rank) for of_rank in sharded}) > 1 or () in sharded:
        raise ValueError("chunks must shard every chunk to one rank, and as many to each rank, at least one")
    if not sharded:
        raise ValueError("layout chunks, and no other, needs the chunks of each rank")
    return sharded


def _checked_ends(ends: Any) -> tuple[int, ...]:
    """cu_seqlens, a list or a tensor, as a tuple without empty documents."""
    try:
        integers = [int(end) for end in (ends.tolist() if isinstance(ends, Tensor) else ends)]
    except TypeError:
        raise ValueError(f"ends of documents must be a list of numbers (cu_seqlens), got {ends!r}") from None
    if integers and (integers[0] != 0 or integers != sorted(integers) or integers[-1] == 0):
        raise ValueError(f"ends of documents must ascend from 0, got {integers[:8]}")
    if not integers:
        raise ValueError("layout zigzag-documents, and no other, needs the ends of the documents")
    return tuple(dict.fromkeys(integers))


KINDS = tuple(BY_WORD)
"""The names of all kinds."""
NAMES = ", ".join(kind.written for kind in BY_WORD.values() if kind.written)
"""The syntax of the names of layouts."""
DEFAULTS: dict[str, Any] = {field.name: field.default for kind in BY_WORD.values() for field in fields(kind)}
"""The parameters of all kinds, with the values that stand for "not given"."""
