"""How many rows a pass moves on which links, all positions together: without its programs, for choosing."""

from __future__ import annotations

from dataclasses import dataclass, field

from burst_mcore.attention.plan import Plan, kept
from burst_mcore.attention.rows import Rows, count, union
from burst_mcore.attention.schedule import Route


@dataclass(frozen=True)
class Volume:
    """Rows that travel, by link ("intra": the next of the node, "inter": the next node)."""

    data: dict[str, int] = field(default_factory=lambda: {"intra": 0, "inter": 0})
    gradient: dict[str, int] = field(default_factory=lambda: {"intra": 0, "inter": 0})


@kept
def read_elsewhere(plan: Plan, *, of_queries: bool) -> float:
    """Rows that positions read of others, as a share of all that they could."""
    others = plan.size * (plan.size - 1)
    if plan.everything or not others:
        return 1.0
    read = sum(
        count(plan.needed(at, by, of_queries=of_queries))
        for at in range(plan.size)
        for by in range(plan.size)
        if at != by
    )
    return read / (others * plan.rows)


@kept
def volume(plan: Plan, route: Route, of_queries: bool, intra_positions: int) -> Volume:
    """What a pass moves; intra_positions: of a node, as links go (a flat ring knows one node, but crosses).

    The same rows that the pruned programs send: a hop of a bundle carries what positions further on read, a
    hop of its gradient what positions so far have read.
    """
    moved = Volume()
    for at in range(plan.size):
        hops = _direct(plan, at, of_queries) if route.direct else _ring(plan, route, at, of_queries)
        for sender, receiver, data, gradient in hops:
            link = "intra" if sender // intra_positions == receiver // intra_positions else "inter"
            moved.data[link] += data
            moved.gradient[link] += gradient
    return moved


Hop = tuple[int, int, int, int]
"""(from, to, rows of the bundle, rows of its gradient)."""


def _direct(plan: Plan, at: int, of_queries: bool) -> list[Hop]:
    found = []
    for by in range(plan.size):
        rows = count(plan.needed(at, by, of_queries=of_queries)) if by != at else 0
        found.append((at, by, rows, rows))
    return found


def _ring(plan: Plan, route: Route, at: int, of_queries: bool) -> list[Hop]:
    """The hops of the bundle of position `at`: node by node, within each one position after another."""
    last, turn = plan.size - 1, -1 if route.mirrored else 1
    m, l = divmod(last - at if route.mirrored else at, route.intra)  # noqa: E741

    def place(node: int, local: int) -> int:
        position = (m + node) % route.nodes * route.intra + (l + local) % route.intra
        return position if turn == 1 else last - position

    read = [
        [plan.needed(at, place(i, j), of_queries=of_queries) for j in range(route.intra)]
        for i in range(route.nodes)
    ]
    hops: list[Hop] = []
    of_nodes = [union([r for rows in of_node for r in rows]) for of_node in read]
    alone = not any(rows for i, of_node in enumerate(read) for j, rows in enumerate(of_node) if i or j)
    so_far: Rows = ()
    for i, of_node in enumerate(read):
        left = _suffixes(of_node)
        of_round: Rows = ()
        for j in range(route.intra - 1):
            of_round = union([*of_round, *of_node[j]])
            gradient = 0 if alone else count(of_round)
            hops.append((place(i, j), place(i, j + 1), count(left[j + 1]), gradient))
        so_far = union([*so_far, *of_nodes[i]])
        if route.nodes > 1:
            ahead = _suffixes(of_nodes)[i + 1] if i + 1 < route.nodes else ()
            hops.append((place(i, 0), place(i + 1, 0), count(ahead), 0))
            end = route.intra - 1
            hops.append((place(i, end), place(i + 1, end), 0, 0 if alone else count(so_far)))
    if route.intra > 1:  # the last hop home
        hops.append((place(0, route.intra - 1), place(0, 0), 0, 0 if alone else count(so_far)))
    return hops


def _suffixes(rows: list[Rows]) -> list[Rows]:
    """The union of each with all that follow."""
    found: list[Rows] = [()]
    for each in reversed(rows):
        found.append(union([*found[-1], *each]))
    return found[::-1]
