"""The ways over some ranks that shapes and settings allow: degrees, placements, meshes and their routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from burst_mcore.attention.autotune.cost import message_bytes
from burst_mcore.attention.geometry.placement import Placement
from burst_mcore.attention.schedule.actions import Kind, Pass
from burst_mcore.attention.schedule.heads import why_not_heads
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.config import RINGS as LEGAL_RINGS
from burst_mcore.config import sides_of
from burst_mcore.rates import Rates

RINGS = LEGAL_RINGS[1:]  # all but "auto"
Mesh = str | tuple[int, int]
"""`BurstConfig.mesh`: "none", "auto", or rings x places of a ring."""


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


def rings_of(mesh: Mesh, placement: Placement, shard: Shard, ranks: Ranks, rates: Rates) -> tuple[int, ...]:
    """Return the numbers of rings to try; "auto": one ring, and the two best meshes.

    These are the meshes whose messages of forward take the shortest on links, if no row is left out.
    """
    positions = placement.positions
    if mesh == "none":
        return (1,)
    if sides := sides_of(mesh):
        return (sides[0],) if math.prod(sides) == positions else ()
    divisors = (a for a in range(2, positions) if positions % a == 0)
    return (1, *sorted(divisors, key=lambda a: _on_links(a, placement, shard, ranks, rates))[:2])


def _on_links(rings: int, placement: Placement, shard: Shard, ranks: Ranks, rates: Rates) -> float:
    """Return the seconds of a rank's messages in forward of a mesh, one after the other, on average.

    The rings are double where nodes cut them into equal parts.
    """
    route = route_for(placement.heads, ranks, ring="double", overlap=True, outer=placement.outer, rings=rings)
    sizes = message_bytes(shard, route, Pass.FORWARD).whole
    keys, queries = sizes[Kind.DATA], sizes[Kind.RESIDENT] + sizes[Kind.SHARE]
    node = placement.rank(torch.arange(placement.positions), 0).view(rings, -1) // ranks.intra
    apart = float((node != node[:, None]).double().sum(1).mean())  # of a column, on another node than a rank
    between = route.nodes - 1.0
    if route.nodes == 1:
        between = (route.places - 1) * float((node != node.roll(1, 1)).double().mean())
    across = apart * queries + between * keys
    within = (rings - 1 - apart) * queries + (route.places - 1 - between) * keys
    return across / rates.link(inter=True) + within / rates.link(inter=False)


def _nodes_of_ring(positions: int, apart: int, intra: int) -> int:
    """Return over how many nodes a ring goes whose positions are `apart` ranks from each other."""
    if apart % intra == 0:
        return positions
    return positions * apart // intra if intra % apart == 0 and positions * apart % intra == 0 else 1


def placements(setting: str, degree: int, ranks: Ranks) -> tuple[bool, ...]:
    """Return whether members of a head group may be far apart (True), neighbours (False), or both, in order.

    setting: `BurstConfig.head_placement`. "auto" tries groups over several nodes where there are such nodes.
    Neighbours that straddle nodes come last.
    """
    if degree in (1, ranks.size) or setting == "inner":
        return (False,)
    if setting == "outer":
        return (True,)
    if ranks.size == ranks.intra:
        return (False,)
    straddles = ranks.intra % degree and degree % ranks.intra
    return (True, False) if straddles else (False, True)


def backward_passes(setting: str) -> tuple[Pass, ...]:
    """Return the backward passes that a setting of `BurstConfig.backward` leaves to choose from."""
    return (Pass.QUERY, Pass.KV) if setting == "auto" else (Pass(setting),)


def overlaps(overlap: bool, degree: int, ranks: Ranks, rates: Rates) -> bool:
    """Return whether to communicate while computing, if `overlap` allows it.

    It does not pay where all ranks share heads and messages take the cores that compute. Nothing would be
    hidden, and computing member by member cuts tiles.
    """
    return overlap and (rates.hidden or degree < ranks.size or degree == 1)
