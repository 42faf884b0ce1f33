"""Random masks and layouts: as hypothesis strategies, and from a seed."""

import random
from functools import reduce
from itertools import pairwise
from operator import and_, or_

import torch
from hypothesis import strategies as st

from burst_mcore import Layout, Mask
from burst_mcore.layout import KINDS
from burst_mcore.layout.kinds import BY_WORD
from burst_mcore.mask import SLICES
from burst_mcore.mask.terms import Documents, Images

MASKS = {"causal": Mask.causal(), "full": Mask.full()}


def random_mask(draw: random.Random, n: int) -> Mask:
    """An intersection of up to three terms over n tokens; of each eighth, one is a union."""
    mask = _intersection(draw, n)
    if draw.random() < 0.125:
        mask &= random_union(draw, n)
    return mask if _images_lie_in_documents(mask, n) else Mask.causal() | random_tree(draw, n)


def random_union(draw: random.Random, n: int) -> Mask:
    """A union of two or three masks, of which none is dilated."""
    parts = [_intersection(draw, n) for _ in range(draw.choice([2, 2, 3]))]
    return reduce(or_, [part for part in parts if part.stride == 1] or [Mask.causal()])


def _intersection(draw, n):
    terms = (draw.choice(TERMS)(draw, n) for _ in range(draw.randint(0, 3)))
    return reduce(and_, terms, Mask.full())


def _images_lie_in_documents(mask, n):
    """By definition: if the product were asked, a legal mask that it refuses would go unseen."""
    terms = [*mask.all_terms()]
    ends = [int(end) for term in terms if isinstance(term, Documents) for end in term.ends]
    images = [rows for term in terms if isinstance(term, Images) for rows in term.ranges[:, :2].tolist()]
    return not any(first < end < last for end in ends for first, last in images)


def _span(draw, n):
    return sorted((draw.randint(0, n), draw.randint(0, n)))


def _window(draw, n):
    return Mask.window(*(draw.choice([None, draw.randrange(n), draw.randrange(min(n, 8))]) for _ in range(2)))


def _documents(draw, n):
    return Mask.documents([0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 8))), n])


def _blocks(draw, n):
    size = draw.randint(1, max(1, n // 2))
    count, density = -(-n // size), draw.random()
    return Mask.blocks([[draw.random() < density for _ in range(count)] for _ in range(count)], size)


def _ranges(draw, n):
    count = draw.randint(1, 6)
    q, k = ([_span(draw, n) for _ in range(count)] for _ in range(2))
    return Mask.ranges(q, k, [draw.choice(SLICES) for _ in range(count)])


def _images(draw, n):
    cuts = sorted(draw.randint(0, n) for _ in range(2 * draw.randint(0, 3)))
    return Mask.images(list(zip(cuts[::2], cuts[1::2], strict=True)))


def _prefix(draw, n):
    if draw.random() < 0.5:
        return Mask.prefix(draw.randint(0, n))
    ends = [0, *sorted(draw.sample(range(1, n), min(n - 1, draw.randint(0, 3)))), n]
    return Mask.prefix([draw.randint(0, b - a) for a, b in pairwise(ends)], ends)


def random_tree(draw: random.Random, n: int) -> Mask:
    """A tree of up to eight nodes, in any order of legal ones."""
    ends = [0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 7))), n]
    lengths = [b - a for a, b in pairwise(ends)]
    return Mask.tree([draw.randint(-1, node - 1) for node in range(len(lengths))], lengths)


def random_chunks(draw: random.Random, n: int) -> Mask:
    """Chunks of any size up to that of the sequence."""
    return Mask.chunked(draw.randint(1, n))


TERMS = (
    lambda draw, n: Mask.causal(),
    _window,
    _window,
    _documents,
    _documents,
    lambda draw, n: Mask.dilated(draw.randint(1, n), draw.randint(1, 5)),
    _blocks,
    _ranges,
    random_chunks,
    lambda draw, n: Mask.causal() | _images(draw, n),
    _images,
    _prefix,
    random_tree,
)


def random_layout(draw: random.Random, size: int, n: int) -> Layout:
    """Any layout for a ring of `size` ranks and n tokens."""
    kind = draw.choice(KINDS)
    if number := BY_WORD[kind].number:
        unit = size if kind == "block-striped" else 1  # blocks are sharded over all ranks
        return Layout(kind, **{number: unit * draw.randint(1, 4)})
    if kind == "zigzag-documents":
        return (
            Layout(kind, ends=tuple(range(0, n + 1, 2 * size))) if n % (2 * size) == 0 else Layout("zigzag")
        )
    if kind == "chunks":
        each = draw.randint(1, 4)
        order = draw.sample(range(size * each), size * each)
        return Layout(kind, chunks=tuple(tuple(order[r * each :][:each]) for r in range(size)))
    return Layout(kind)


randoms = st.integers(0, 2**32).map(random.Random)


def layouts(size: int) -> list[Layout]:
    """One of each kind."""
    words = ["contiguous", "zigzag", "stacked-zigzag:2", "striped", f"block-striped:{4 * size}"]
    sharded = tuple((r, 2 * size - 1 - r, 2 * size + (r + 1) % size) for r in range(size))
    return [*map(Layout.of, words), Layout("chunks", chunks=sharded)]


def brute(mask: Mask, n: int) -> torch.Tensor:
    """Bool [n, n]."""
    return mask.allows(torch.arange(n), torch.arange(n))
