"""The ways over some ranks that shapes and settings allow: degrees, placements, meshes and their routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import why_not_heads
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.config import RINGS as LEGAL_RINGS
from burst_mcore.config import BurstConfig, sides_of
from burst_mcore.rates import Rates

RINGS = LEGAL_RINGS[1:]  # all but "auto"
SEARCHED = ("double", "direct")
"""The rings that a call searches with "auto"; a flat one gains nothing more: docs/evidence/decisions.md."""
Mesh = str | tuple[int, int]
"""`BurstConfig.mesh`: "none", or rings x places of a ring; "auto" is a search of `burst-mcore explain`."""


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


def factors(size: int) -> Iterator[tuple[int, int]]:
    """Yield every (a, b) with a b = size."""
    return ((a, size // a) for a in range(1, size + 1) if size % a == 0)


def legal_degrees(ranks: Ranks, heads: int, kv_heads: int) -> list[int]:
    """Return the degrees of head parallelism that ranks and heads allow."""
    return [d for d in range(1, ranks.size + 1) if why_not_degree(d, ranks, heads, kv_heads) is None]


def route_for(
    degree: int, ranks: Ranks, *, ring: str, overlap: bool, outer: bool = False, rings: int = 1
) -> Route:
    """Return the route where `degree` ranks share heads: neighbours, or one of each ring (`outer`).

    Args:
        ring: "double", "flat" or "direct". Where nodes do not cut the ring into equal parts, it is flat.
        rings: rings side by side, of a mesh.
    """
    positions, outer = ranks.size // degree, outer and 1 < degree < ranks.size
    if ring == "direct":
        return Route(1, positions, degree, overlap, direct=positions > 1, outer=outer)
    places = positions // rings
    nodes = 1 if ring == "flat" else _nodes_of_ring(places, 1 if outer else degree, ranks.intra)
    return Route(nodes, places // nodes, degree, overlap, outer=outer, rings=rings)


def rings_of(mesh: Mesh, positions: int) -> tuple[int, ...]:
    """Return the numbers of rings to try; "auto": one ring, and every mesh."""
    if mesh == "auto":
        return (1, *(rings for rings in range(2, positions) if positions % rings == 0))
    sides = sides_of(mesh) or (1, positions)
    return (sides[0],) if math.prod(sides) == positions else ()


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


def backward_passes(setting: str) -> tuple[Pass, ...]:
    """Return the backward passes that a setting of `BurstConfig.backward` leaves to choose from."""
    return (Pass.QUERY, Pass.KV) if setting == "auto" else (Pass(setting),)


def overlaps(overlap: bool, degree: int, ranks: Ranks, rates: Rates) -> bool:
    """Return whether to communicate while computing, if `overlap` allows it.

    It does not pay where all ranks share heads and messages take the cores that compute. Nothing would be
    hidden, and computing member by member cuts tiles.
    """
    return overlap and (rates.hidden or degree < ranks.size or degree == 1)


def degrees_of(config: BurstConfig, ranks: Ranks, shard: Shard) -> tuple[int, ...]:
    """Return the degrees of head parallelism to choose from; ValueError if the configured one is illegal."""
    degree, named = config.head_parallel, f"head_parallel={config.head_parallel}"
    if sides := sides_of(config.mesh):
        check_mesh(config, sides, ranks)
        degree = ranks.size // math.prod(sides)
        named = f"mesh={config.mesh}, and so head_parallel={degree},"
    if not isinstance(degree, int):
        return tuple(legal_degrees(ranks, shard.heads, shard.kv_heads))
    why_not = why_not_degree(degree, ranks, shard.heads, shard.kv_heads)
    if why_not is not None:
        raise ValueError(
            f"{named} is not legal with {shard.heads} heads, {shard.kv_heads} K/V heads and "
            f"{ranks.size} ranks, {ranks.intra} a node: {why_not}; legal: "
            f"{legal_degrees(ranks, shard.heads, shard.kv_heads)}"
        )
    return (degree,)


def check_mesh(config: BurstConfig, sides: tuple[int, int], ranks: Ranks) -> None:
    """Raise ValueError if the configured mesh does not go with so many ranks."""
    rows, columns = sides
    degree = config.head_parallel
    if ranks.size % (rows * columns) or (degree != "auto" and rows * columns * degree != ranks.size):
        legal = f"sides and degrees that divide {ranks.size}"
        if isinstance(degree, int) and ranks.size % degree == 0:
            legal = ", ".join(f"{a}x{b}" for a, b in factors(ranks.size // degree))
        raise ValueError(
            f"mesh={rows}x{columns} with head_parallel={degree} is not legal: rows x columns x head_parallel "
            f"must be the {ranks.size} ranks; legal: {legal}"
        )
