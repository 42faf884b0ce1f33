"""The ways over some ranks that shapes and settings allow: degrees, placements and their routes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from burst_mcore.attention.schedule.heads import why_not_heads
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.config import RINGS as LEGAL_RINGS
from burst_mcore.config import BurstConfig

RINGS = LEGAL_RINGS[1:]  # all but "auto"
SEARCHED = ("double", "direct")
"""The rings that a call searches with "auto"; a flat one gains nothing more: docs/evidence/decisions.md."""


@dataclass(frozen=True)
class Ranks:
    """Where the ranks are, `size` in all and `intra` on each node: a Topology without its process groups."""

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
    """Return the route where `degree` ranks share heads: neighbours, or one of each ring (`outer`).

    ring: "double", "flat" or "direct". Where nodes do not cut the ring into equal parts, it is flat.
    """
    positions, outer = ranks.size // degree, outer and 1 < degree < ranks.size
    if ring == "direct":
        return Route(1, positions, degree, overlap, direct=positions > 1, outer=outer)
    nodes = 1 if ring == "flat" else _nodes_of_ring(positions, 1 if outer else degree, ranks.intra)
    return Route(nodes, positions // nodes, degree, overlap, outer=outer)


def _nodes_of_ring(positions: int, apart: int, intra: int) -> int:
    """Return over how many nodes a ring goes whose positions are `apart` ranks from each other."""
    if apart % intra == 0:
        return positions
    return positions * apart // intra if intra % apart == 0 and positions * apart % intra == 0 else 1


def placements(setting: str, degree: int, ranks: Ranks) -> tuple[bool, ...]:
    """Return whether members of a head group may be neighbours (False), far apart (True), or both.

    setting: `BurstConfig.head_placement`. "auto" tries groups over several nodes where there are such nodes.
    """
    if degree in (1, ranks.size) or setting == "inner":
        return (False,)
    if setting == "outer":
        return (True,)
    return (False,) if ranks.size == ranks.intra else (False, True)


def searched_rings(setting: str, ranks: Ranks) -> tuple[str, ...]:
    """Return the rings that a setting of `BurstConfig.ring` leaves to choose from."""
    if setting != "auto":
        return (setting,)
    # The ring of two ranks is their direct exchange, but that gradients come home in a dtype no wider.
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
    """The kinds of ways between which "auto" chooses, the plainest first: equally fast, the first wins."""

    RING = 0
    HEADS_WITHIN = 1
    DIRECT = 2
    HEADS_ACROSS = 3

    @classmethod
    def of(cls, route: Route, intra: int) -> Family:
        """Return the last word that a route needs; intra: ranks of a node."""
        if route.heads > 1 and route.size > intra and (route.outer or intra % route.heads):
            return cls.HEADS_ACROSS
        if route.direct:
            return cls.DIRECT
        return cls.HEADS_WITHIN if route.heads > 1 else cls.RING
