"""The question that the cost model answers, the representative of its kind, and the settings to search."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from burst_mcore.attention.autotune.ways import (
    Ranks,
    backward_passes,
    degrees_of,
    overlaps,
    placements,
    route_for,
    searched_rings,
)
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates


@dataclass(frozen=True)
class Question:
    """All of a call that its time depends on, but for settings. Answers are cached by questions."""

    shard: Shard
    """The shapes of a rank."""
    layout: Layout
    """Of the sequence."""
    mask: Mask
    """Over the sequence."""
    n: int
    """Tokens of the whole sequence."""
    ranks: Ranks
    rates: Rates
    """Of their links and kernels."""

    @property
    def typical(self) -> Question:
        """The representative of all questions whose layout and mask are of one kind."""
        layout, mask = _typical(self.layout, self.mask, self.n, self.ranks.size)
        return replace(self, layout=layout, mask=mask)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `BurstConfig` that a search combines; of those left to it, all that are tried."""

    overlap: bool
    rings: tuple[str, ...]
    degrees: tuple[int, ...]
    """Of head parallelism."""
    directions: tuple[Pass, ...]
    placement: str = "auto"


def settings_of(config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None) -> Settings:
    """Return the settings that a configuration leaves to the search of a call."""
    return Settings(
        overlap=config.overlap,
        rings=searched_rings(config.ring, question.ranks),
        degrees=degrees_of(config, question.ranks, question.shard) if degrees is None else degrees,
        directions=backward_passes(config.backward),
        placement=config.head_placement,
    )


def routes(question: Question, settings: Settings) -> dict[Route, str]:
    """Return the routes that settings allow, each with its ring's word."""
    ranks, words = question.ranks, dict[Route, str]()
    for degree in settings.degrees:
        hides = overlaps(settings.overlap, degree, ranks, question.rates)
        for outer, ring in itertools.product(placements(settings.placement, degree, ranks), settings.rings):
            if ring == "flat" and "double" in settings.rings and degree >= ranks.intra and not outer:
                continue  # between nodes that share all heads the two are one
            route = route_for(degree, ranks, ring=ring, overlap=hides, outer=outer)
            words.setdefault(route, ring)
    return words


@lru_cache(maxsize=256)
def _typical(layout: Layout, mask: Mask, n: int, size: int) -> tuple[Layout, Mask]:
    """Return the representative of a kind of layout and mask.

    Documents are replaced by others, the same for all of a kind. They are about as long as a typical token's
    document, to a power of two. Their lengths differ, so that they end anywhere in a rank's share, as real
    ones do. The chunks of a layout that was made for documents are dealt in turn.
    """
    ends = mask.document_ends
    if ends is None:
        return layout, mask
    lengths = ends.diff().double()
    length = min(n, 2 ** round(float(((lengths**2).sum() / lengths.sum()).log2())))
    if layout.kind == "zigzag-documents":
        length = max(1, round(length / (2 * size))) * 2 * size
        even = torch.tensor([*range(0, n, length), n])
        return Layout("zigzag-documents", ends=tuple(even.tolist())), mask.of_layer & Mask.documents(even)
    if layout.kind == "chunks":
        dealt = size * len(layout.chunks[0])
        layout = Layout("chunks", chunks=tuple(tuple(range(r, dealt, size)) for r in range(size)))
    return layout, mask.of_layer & Mask.documents(_uneven(n, length))


def _uneven(n: int, length: int) -> Tensor:
    """Return cu_seqlens of documents of half to one and a half times `length`; always the same."""
    several = torch.randint(length // 2, length + length // 2 + 1, (2 * n // length + 2,),
                            generator=torch.Generator().manual_seed(0))  # fmt: skip
    ends = several.clamp(min=1).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < n], torch.tensor([n])])
