"""The candidates of a call: routes that ranks, shapes and settings allow, and the input of the rule.

A `Question` has all facts of a call that the rule uses; similar calls share a representative, counted once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import why_not_heads
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import RINGS as LEGAL_RINGS
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.mask.terms import Documents, Window
from burst_mcore.rates import Rates

MANY = 64
"""The number of ranks above which a ring repeats its steps, so that fewer nodes are counted."""
RINGS = LEGAL_RINGS[1:]  # all but "auto"
SEARCHED = ("double", "direct")
"""The rings that "auto" searches; a flat ring has no further gain: docs/evidence/decisions.md."""


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, `size` in all and `intra` on each node: a Topology without process groups."""

    size: int
    intra: int


def why_not_placed(degree: int, ranks: Ranks) -> str | None:
    """Return why the ranks cannot be cut into groups of `degree`; None if they can."""
    return f"it does not divide the {ranks.size} ranks" if ranks.size % degree else None


def why_not_degree(degree: int, ranks: Ranks, heads: int, kv_heads: int) -> str | None:
    """Return why `degree` ranks cannot share these heads; None if they can."""
    return why_not_placed(degree, ranks) or why_not_heads(heads, kv_heads, degree)


def legal_degrees(ranks: Ranks, heads: int, kv_heads: int) -> list[int]:
    """Return the degrees of head parallelism that ranks and heads allow."""
    return [d for d in range(1, ranks.size + 1) if why_not_degree(d, ranks, heads, kv_heads) is None]


def route_for(degree: int, ranks: Ranks, *, ring: str, overlap: bool, outer: bool = False) -> Route:
    """Return the route of `degree` ranks that share heads: neighbours, or one rank of each ring (`outer`).

    ring: "double", "flat" or "direct". A double ring that nodes cut into unequal parts becomes flat.
    """
    ring_size, outer = ranks.size // degree, outer and 1 < degree < ranks.size
    if ring == "direct":
        return Route(1, ring_size, degree, overlap, direct=ring_size > 1, outer=outer)
    nodes = 1 if ring == "flat" else _nodes_of_ring(ring_size, 1 if outer else degree, ranks.intra)
    return Route(nodes, ring_size // nodes, degree, overlap, outer=outer)


def _nodes_of_ring(ring_size: int, spacing: int, intra: int) -> int:
    """Return the number of nodes of a ring with ring ranks `spacing` ranks from each other."""
    if spacing % intra == 0:
        return ring_size
    return ring_size * spacing // intra if intra % spacing == 0 and ring_size * spacing % intra == 0 else 1


def placements(setting: str, degree: int, ranks: Ranks) -> tuple[bool, ...]:
    """Return the placements of a head group's members to try: neighbours (False), far apart (True), or both.

    setting: `BurstConfig.head_placement`. With several nodes "auto" tries groups over several nodes.
    """
    if degree in (1, ranks.size) or setting == "inner":
        return (False,)
    if setting == "outer":
        return (True,)
    return (False,) if ranks.size == ranks.intra else (False, True)


def searched_rings(setting: str, ranks: Ranks) -> tuple[str, ...]:
    """Return the rings that a setting of `BurstConfig.ring` allows."""
    if setting != "auto":
        return (setting,)
    # With two ranks ring and direct exchange differ only in the dtype of gradients, narrower on the ring.
    return SEARCHED if ranks.size > 2 else SEARCHED[:1]


def degrees_of(config: BurstConfig, ranks: Ranks, shard: Shard) -> tuple[int, ...]:
    """Return the degrees of head parallelism to choose from; ValueError if the configured one is illegal."""
    degree = config.head_parallel
    if not isinstance(degree, int):
        return tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    why_not = why_not_degree(degree, ranks, shard.heads, shard.kv_heads)
    if why_not is not None:
        raise ValueError(
            f"head_parallel={degree} is not legal with {shard.heads} heads, {shard.kv_heads} K/V heads and "
            f"{ranks.size} ranks, {ranks.intra} a node: {why_not}; legal: "
            f"{legal_degrees(ranks, shard.heads, shard.kv_heads)}"
        )
    return (degree,)


class Family(IntEnum):
    """The kinds of candidates of "auto", the plainest first: at a tie the first wins."""

    RING = 0
    HEADS_WITHIN = 1
    DIRECT = 2
    HEADS_ACROSS = 3

    @classmethod
    def of(cls, route: Route, intra: int) -> Family:
        """Return the most complex feature that a route uses; intra: ranks of a node."""
        if route.heads > 1 and route.size > intra and (route.outer or intra % route.heads):
            return cls.HEADS_ACROSS
        if route.direct:
            return cls.DIRECT
        return cls.HEADS_WITHIN if route.heads > 1 else cls.RING


@dataclass(frozen=True)
class Question:
    """The facts about a call that decide its time, without settings; the cache key of decisions."""

    shard: Shard
    """The shapes of a rank's shard."""
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
        """The representative of all questions with a layout and a mask of the same kind."""
        layout, mask = _typical(self.layout, self.mask, self.n, self.ranks.size)
        return replace(self, layout=layout, mask=mask)

    def with_latent(self, rotates: bool) -> Question:
        """Return the question with a rotating latent (True), or rotating K and V (False)."""
        return replace(self, shard=replace(self.shard, latent_rotates=rotates))

    @property
    def reach(self) -> int | None:
        """Tokens between a query and its farthest key, if windows or documents bound them."""
        ends, windows = self.mask.document_ends, (t for t in self.mask.terms if isinstance(t, Window))
        bounds = [window.left for window in windows if window.left is not None]
        return min(bounds + ([] if ends is None else [int(ends.diff().max())]), default=None)

    def shortened(self, degrees: Sequence[int]) -> Question:
        """Return the question on fewer nodes, if a ring's steps are alike; degrees: of head parallelism."""
        intra, tokens = self.ranks.intra, self.shard.tokens
        minimum = max(MANY, 4 * max(degrees), 2 * (self.reach or 0) / tokens)
        alike = all(isinstance(term, (Window, Documents)) for term in self.mask.terms)
        fits = (size for size in range(intra, self.ranks.size, intra) if self.ranks.size % size == 0)
        size = next((x for x in fits if x >= minimum and not any(x % each for each in degrees)), None)
        if not alike or size is None or self.layout.kind in ("chunks", "zigzag-documents"):
            return self
        n, mask, ends = tokens * size, self.mask, self.mask.document_ends
        if ends is not None:
            mask = mask.of_layer & Mask.documents(torch.cat([ends[ends < n], torch.tensor([n])]))
        return replace(self, mask=mask.clipped(n), n=n, ranks=Ranks(size, intra))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values to try of each setting of `BurstConfig`."""

    overlap: bool
    rings: tuple[str, ...]
    degrees: tuple[int, ...]
    """Of head parallelism."""
    directions: tuple[Pass, ...]
    placement: str = "auto"


def settings_of(config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None) -> Settings:
    """Return the values of settings that a configuration allows."""
    every = Pass.QUERY, Pass.KV
    return Settings(
        overlap=config.overlap,
        rings=searched_rings(config.ring, question.ranks),
        degrees=degrees_of(config, question.ranks, question.shard) if degrees is None else degrees,
        directions=every if config.backward == "auto" else (Pass(config.backward),),
        placement=config.head_placement,
    )


def routes(question: Question, settings: Settings) -> dict[Route, str]:
    """Return the routes that settings allow, each with its option of `BurstConfig.ring`."""
    ranks, words = question.ranks, dict[Route, str]()
    for degree in settings.degrees:
        # Compute member by member only where it hides a message.
        hides = settings.overlap and (question.rates.hidden or degree < ranks.size or degree == 1)
        for outer, ring in product(placements(settings.placement, degree, ranks), settings.rings):
            if ring == "flat" and "double" in settings.rings and degree >= ranks.intra and not outer:
                continue  # the same route: each node shares all heads
            words.setdefault(route_for(degree, ranks, ring=ring, overlap=hides, outer=outer), ring)
    return words


@lru_cache(maxsize=256)
def _typical(layout: Layout, mask: Mask, n: int, size: int) -> tuple[Layout, Mask]:
    """Return the representative of a kind of layout and mask.

    All documents of a kind are replaced by the same documents, about as long as a typical token's document,
    rounded to a power of two. Their lengths differ, so that they end anywhere in a rank's shard, like real
    documents. The chunks of a layout for documents are sharded in turn.
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
        sharded = size * len(layout.chunks[0])
        layout = Layout("chunks", chunks=tuple(tuple(range(r, sharded, size)) for r in range(size)))
    return layout, mask.of_layer & Mask.documents(_uneven(n, length))


def _uneven(n: int, length: int) -> Tensor:
    """Return cu_seqlens of documents of random lengths, 0.5 to 1.5 times `length`, with a fixed seed."""
    lengths = torch.randint(length // 2, length + length // 2 + 1, (2 * n // length + 2,),
                            generator=torch.Generator().manual_seed(0))  # fmt: skip
    ends = lengths.clamp(min=1).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < n], torch.tensor([n])])


def kernel_seconds(shard: Shard, pass_: Pass, rates: Rates, pairs: Tensor) -> Tensor:
    """Return the seconds of kernel calls and of their passes over memory, by their query-key pairs.

    The rows of a call are estimated as sqrt(2 pairs), the side of a triangle with as many pairs. A rotating
    latent is expanded for each block.
    """
    forward, heads = pass_ == Pass.FORWARD, shard.batch * shard.heads
    rate = rates.compute if forward else rates.backward or rates.compute
    d, dv = rates.computed(shard.head_dim), rates.computed(shard.value_dim)
    width = d + dv if forward else 3 * d + 2 * dv  # of 2 products, or of 5
    per_pair = 2 * heads * width / rate + heads / rates.exponentials
    wave = rates.wave if forward or rates.wave_backward is None else rates.wave_backward
    q, out, kv = heads * shard.head_dim, heads * shard.value_dim, shard.batch * math.prod(shard.carried)
    # Bytes for each number of a row, as tests/kernels/test_passes.py counts them on a ring of 8.
    around = {Pass.FORWARD: 2.5 * out, Pass.KV: 2.5 * q + 10 * kv, Pass.QUERY: 10 * q + 2.5 * kv + 3.3 * out}
    per_row = (rates.fill + wave / 2 / heads) * per_pair + around[pass_] / rates.memory
    if shard.latent_rotates and pass_ != Pass.QUERY:
        per_row += expansion_seconds(shard, pass_, rates)
    return pairs * per_pair + (2 * pairs).sqrt().clamp(max=shard.tokens) * per_row


def expansion_seconds(shard: Shard, pass_: Pass, rates: Rates) -> float:
    """Return the seconds to expand the latent of one token of each sequence, in backward with gradients."""
    if shard.latent is None:
        return 0.0
    products = 1 if pass_ == Pass.FORWARD else 3  # of K and V; of the latent's and of the weights'
    width, rope = shard.latent
    made = shard.batch * shard.kv_heads * (shard.head_dim - rope + shard.value_dim)
    moved = 2 * made * shard.itemsize * (1 if products == 1 else 2)
    return 2 * products * made * width / rates.compute + moved / rates.memory
