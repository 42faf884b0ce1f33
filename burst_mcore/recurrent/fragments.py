"""Fragments, consecutive tokens of one document on one rank; chains, the fragments of one document."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from burst_mcore.layout import Layout

Ends = tuple[int, ...]
"""cu_seqlens of the documents: 0, ..., the length of the sequence; () stands for one document."""


class Fragment(NamedTuple):
    """Tokens [start, stop) of one document, on a rank from `row` of its shard on."""

    rank: int
    start: int
    stop: int
    row: int
    begins: bool
    """Whether the fragment begins its document: its initial state is zero."""
    ends: bool
    """Whether the fragment ends its document: its last state is not needed."""

    @property
    def rows(self) -> range:
        """Rows of the fragment in the shard."""
        return range(self.row, self.row + self.stop - self.start)

    def __str__(self) -> str:
        return f"{'[' if self.begins else '('}{self.start}:{self.stop}{']' if self.ends else ')'}@{self.rank}"


Chain = tuple[Fragment, ...]
"""The fragments of one document, in the order of tokens."""


@lru_cache(maxsize=256)
def fragments(layout: Layout, tokens: int, size: int, ends: Ends = ()) -> tuple[Fragment, ...]:
    """Return the fragments of all `size` ranks, in the order of the `tokens` tokens of the whole sequence.

    Raises:
        ValueError: the layout shards neighbouring tokens to different ranks, or the documents do not end with
            the sequence.
    """
    ends = ends or (0, tokens)
    if ends[0] != 0 or ends[-1] != tokens or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"documents must ascend from 0 to the {tokens} tokens of the sequence, got {ends}")
    runs: list[list[int]] = layout.run_table(tokens, size).tolist()
    if any(step > 1 for *_, step in runs):
        raise ValueError(
            f"layout {layout} shards neighbouring tokens to different ranks: a state would rotate for each "
            f"token of a recurrence. Choose zigzag, contiguous or block-striped:{128 * size}"
        )
    result, rows, borders = [], [0] * size, {*ends}
    for rank, first, last, _ in runs:
        stop = min(last, tokens)
        inner_ends = ends[bisect_right(ends, first) : bisect_left(ends, stop)]
        for a, b in pairwise(dict.fromkeys((first, *inner_ends, stop)) if first < stop else ()):
            result.append(Fragment(rank, a, b, rows[rank], a in borders, b in borders))
            rows[rank] += b - a
    return tuple(sorted(result, key=lambda fragment: fragment.start))


@lru_cache(maxsize=256)
def chains(layout: Layout, tokens: int, size: int, ends: Ends = ()) -> tuple[Chain, ...]:
    """Return the chains of documents with several fragments. Raises ValueError as `fragments`."""
    documents: list[list[Fragment]] = []
    for fragment in fragments(layout, tokens, size, ends):
        if fragment.begins:
            documents.append([])
        documents[-1].append(fragment)
    return tuple(tuple(document) for document in documents if len(document) > 1)
