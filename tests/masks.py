"""Random masks and layouts: as hypothesis strategies, and from a seed."""

import random

import torch
from hypothesis import strategies as st

from burst_mcore import Layout, Mask
from burst_mcore.layout import KINDS
from burst_mcore.layout.kinds import BY_WORD
from burst_mcore.mask import SLICES

MASKS = {"causal": Mask.causal(), "full": Mask.full()}


def random_mask(draw: random.Random, n: int) -> Mask:
    """An intersection of up to three terms over n tokens."""
    mask = Mask.full()
    for _ in range(draw.randint(0, 3)):
        mask &= draw.choice(TERMS)(draw, n)
    return mask


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


TERMS = (
    lambda draw, n: Mask.causal(),
    _window,
    _window,
    _documents,
    _documents,
    lambda draw, n: Mask.dilated(draw.randint(1, n), draw.randint(1, 5)),
    _blocks,
    _ranges,
)


def random_layout(draw: random.Random, size: int, n: int) -> Layout:
    """Any layout for a ring of `size` ranks and n tokens."""
    kind = draw.choice(KINDS)
    if number := BY_WORD[kind].number:
        unit = size if kind == "block-striped" else 1  # blocks are dealt over all ranks
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
    dealt = tuple((r, 2 * size - 1 - r, 2 * size + (r + 1) % size) for r in range(size))
    return [*map(Layout.of, words), Layout("chunks", chunks=dealt)]


def brute(mask: Mask, n: int) -> torch.Tensor:
    """Bool [n, n]."""
    return mask.allows(torch.arange(n), torch.arange(n))
