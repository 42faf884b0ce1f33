"""Heads by all-to-all: each rank runs a kernel on its share of the heads, over the whole sequence.

An exchange before the kernel brings each rank all tokens of its heads, in their order. Another brings outputs
back to the shards. Several ranks get the same part of a tensor that has fewer groups of heads than there are
ranks, or none: its gradient is the sum of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from burst_mcore.layout import Layout
from burst_mcore.recurrent.exchange import MovedRows, RowMoves, resized
from burst_mcore.recurrent.fragments import documents
from burst_mcore.recurrent.halo import Pairs, program_of
from burst_mcore.recurrent.kernels import Heads, Tensors
from burst_mcore.recurrent.programs import Exchange
from burst_mcore.recurrent.sequence import Shards


@lru_cache(maxsize=256)
def heads(layout: Layout, tokens: int, size: int, intra: int) -> Exchange:
    """Return the programs that bring each rank all tokens of its heads.

    A row of a message is a token of the receiver's heads. Outputs go back by the same programs, turned.
    """
    pairs: Pairs = defaultdict(list)
    filled = [0] * size
    for rank, first, last, step in layout.run_table(tokens, size).tolist():
        run = range(first, min(last, tokens), step)
        rows = range(filled[rank], filled[rank] + len(run))
        filled[rank] = rows.stop
        for target in range(size) if run else ():
            pairs[rank, target].append((rows, run))
    programs = tuple(program_of(rank, pairs, size, into="whole") for rank in range(size))
    return Exchange("heads: the whole sequence of each rank's heads", programs, intra)


def by_heads(kernel: Heads, tensors: Tensors, shards: Shards) -> Tensor:
    """Return the outputs of this rank's tokens.

    Raises:
        ValueError: the ranks cannot share the heads evenly (before any message); outputs have another shape.
    """
    size, rank, dim = shards.topology.size, shards.topology.rank, kernel.dim
    counts, ends = _counts(kernel, tensors, size), documents(shards.tokens, shards.ends)
    parameters = tuple(x.chunk(size)[rank] if x.dim() else x for x in kernel.parameters)
    shapes = [x.shape for x in tensors]
    where = shards.layout, shards.tokens, size, shards.topology.intra_size
    moves = partial(RowMoves, f"heads, {kernel.name}", shards, dim, heads(*where).programs[rank])
    if size > 1:
        share = partial(_share, kernel.heads, size)
        there = [resized(x, dim, shards.tokens) for x in share(tensors, rank)]
        forth = moves((there, shapes), share, tuple(count < size for count in counts))
        tensors = MovedRows.apply(forth, False, *tensors)  # type: ignore[no-untyped-call]
    pieces = [tuple(x.narrow(dim, a, b - a) for x in tensors) for a, b in pairwise(ends) if b > a]
    out = torch.cat([kernel.run(piece, parameters) for piece in pieces], dim)
    if out.shape != (like := tensors[kernel.like]).shape:
        raise ValueError(f"{kernel.name} gave outputs {tuple(out.shape)}, its like has {tuple(like.shape)}")
    if size > 1:
        share = partial(_share, (kernel.heads[kernel.like],), size)
        back = moves(([out.shape], [shapes[kernel.like]]), share)
        (out,) = MovedRows.apply(back, True, out)  # type: ignore[no-untyped-call]
    return out


def _counts(kernel: Heads, tensors: Tensors, size: int) -> list[int]:
    """Return how many heads, or groups of heads, each tensor has. Raises ValueError as `by_heads`."""
    if len(kernel.heads) != len(tensors):
        raise ValueError(f"{kernel.name}: {len(tensors)} tensors need as many heads=, got {kernel.heads}")
    counts = [1 if at is None else x.shape[at] for x, at in zip(tensors, kernel.heads, strict=True)]
    groups = [count for count in counts if size % count]  # of fewer than ranks, several ranks share each
    for count in (counts[kernel.like], *groups, *(len(x) for x in kernel.parameters if x.dim())):
        if count % size:
            raise ValueError(
                f"{kernel.name}: {size} ranks cannot share {count} heads evenly. Choose a number of ranks "
                f"that divides the heads, or a kernel with a state and way='states'"
            )
    return counts


def _share(dims: tuple[int | None, ...], size: int, tensors: Tensors, rank: int) -> Tensors:
    """Return what of tensors with all heads a rank gets: consecutive heads, or the group that they share."""
    parts = []
    for x, dim in zip(tensors, dims, strict=True):
        many = 1 if dim is None else min(size, x.shape[dim])
        parts.append(x.chunk(many, dim or 0)[rank * many // size])
    return tuple(parts)
