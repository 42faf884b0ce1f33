"""Closed formulas for the bytes that a rank sends: rings and shared heads.

Each of G ranks has N / G tokens. Groups of h ranks pool tokens and divide the heads; a ring over the groups
moves keys and values, or queries: h = 1 is RingAttention, h = G Ulysses.

Masks are full. `cost` counts the bytes of programs; tests hold the two against each other.

Between nodes (of 8), forward of 32 heads on 64, 256, 1024 ranks moves 4, 16, 25.7 times fewer bytes with
heads across nodes than a double ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.route import Route


@dataclass(frozen=True, kw_only=True)
class Share:
    """The bytes of one rank's rows, of all heads, in the dtype of Q, K and V."""

    heads: int
    kv_heads: int
    """Heads among which keys and values can be divided; a latent is one."""
    q: float
    out: float
    kv: float
    statistic: float
    """Of LSE, or of D."""
    gradient: float = 2.0
    """The size of a rotating gradient over that of the same numbers of Q, K or V."""

    @classmethod
    def of(cls, shard: Shard) -> Self:
        """Return the bytes of a rank's share of a call."""
        return cls(
            heads=shard.heads, kv_heads=shard.carried[0], q=shard.q_bytes, out=shard.out_bytes,
            kv=shard.kv_bytes, statistic=shard.statistic_bytes,
            gradient=shard.grad_itemsize / shard.itemsize,
        )  # fmt: skip


def least(share: Share, places: int) -> float:
    """Return the bytes that a rank sends at least in a pass, however the pairs are cut into rectangles.

    A place is a rank, or a node whose ranks share the bytes. It computes R x C pairs for n = H / h heads, and
    has N / places rows already. Up to H places it is best to take whole heads, R = C = N: Ulysses. Beyond,
    rows and columns in balance give about 4 N d / sqrt(r h G), less the own rows. r h is at most H, so that
    4 N d / sqrt(H G) remains. Every number counts once, in the dtype of Q. A backward that keeps Q, K and V
    moves as many numbers: dO in, dQ, dK and dV out.
    """
    return min(_least_with(share, places, n) for n in range(1, share.heads + 1) if n * places >= share.heads)


def _least_with(share: Share, places: int, n: int) -> float:
    """Return `least` where every place computes for n heads."""
    blocks = share.heads * places / n  # R C, in rows of a place
    row = (share.q + share.out) * n / share.heads
    column = share.kv * max(1 / share.kv_heads, n / share.heads)
    rows = min(max(math.sqrt(blocks * column / row), blocks / places), places)
    return (rows - 1) * row + (blocks / rows - 1) * column


class Step(NamedTuple):
    """The bytes of a step: what is read, the sum that follows, and that sum on its last step."""

    data: float
    sums: float
    last: float

    def around(self, size: int) -> float:
        """Return the bytes of a rank on a ring: its own share stays, and the last step is rounded."""
        return 0.0 if size == 1 else (size - 1) * self.data + (size - 2) * self.sums + self.last

    def between(self, nodes: int) -> float:
        """Return the bytes of a rank between nodes, if the last step is one within a node."""
        return (nodes - 1) * (self.data + self.sums)


def of_rows(share: Share) -> Step:
    """Return the step of queries in backward: Q, dO, D and LSE, and dQ."""
    data, sums = share.q + share.out + 2 * share.statistic, share.q * share.gradient
    return Step(data, sums, min(share.q, sums))


def pooled_kv(share: Share, heads: int) -> float:
    """Return the bytes of K and V of a group's tokens, of the heads of one member."""
    return share.kv * max(1.0, heads / share.kv_heads)


def of_columns(share: Share, pass_: Pass, heads: int = 1) -> Step:
    """Return the step of keys and values; in backward dK and dV follow."""
    data = pooled_kv(share, heads)
    if pass_ == Pass.FORWARD:
        return Step(data, 0.0, 0.0)
    sums = data * share.gradient
    return Step(data, sums, sums if heads > share.kv_heads else min(data, sums))


def exchanged(share: Share, pass_: Pass, heads: int) -> float:
    """Return the bytes that a rank sends to one other member of its head group: A / (h - 1) of the formula.

    Q, K, V go in and O out. In backward dO and D go in, and dQ, dK, dV out, since the others are kept. Where
    members share a K/V head, dK and dV are summed over them, in the dtype of sums.
    """
    one = pooled_kv(share, heads) / heads
    if pass_ == Pass.FORWARD:
        return (share.q + share.out) / heads + one
    wide = share.gradient if heads > share.kv_heads else 1.0
    return (share.q + share.out + share.statistic) / heads + one * wide


Links = dict[Link, float]
"""Bytes within and between nodes."""


def of_ring(share: Share, pass_: Pass, route: Route, intra: int) -> Links:
    """Return the bytes that a rank sends within and between nodes of `intra` ranks, on average.

    Raises:
        ValueError: a direct exchange, or nodes that cut head groups into unequal parts.
    """
    step = of_rows(share) if pass_ == Pass.QUERY else of_columns(share, pass_, route.heads)
    return _joined(_of_heads(share, pass_, route, intra), _of_places(step, route, intra))


def _joined(*parts: Links) -> Links:
    return {link: sum(part[link] for part in parts) for link in (Link.INTRA, Link.INTER)}


def _of_heads(share: Share, pass_: Pass, route: Route, intra: int) -> Links:
    """Return the bytes of the exchange of heads."""
    near = _near(route, intra)
    one = exchanged(share, pass_, route.heads) if route.heads > 1 else 0.0
    return {Link.INTRA: (near - 1) * one, Link.INTER: (route.heads - near) * one}


def _of_places(step: Step, route: Route, intra: int) -> Links:
    """Return the bytes of a ring, or of a double ring, over the positions of a route."""
    if route.nodes > 1 and route.intra > 1:
        # The last step takes the place of one of a sum.
        within = route.nodes * (route.intra - 1) * (step.data + step.sums) - step.sums + step.last
        return {Link.INTRA: within, Link.INTER: step.between(route.nodes)}
    crossing, around = _crossing(route, intra), step.around(route.ring_size)
    return {Link.INTRA: (1 - crossing) * around, Link.INTER: crossing * around}


def _near(route: Route, intra: int) -> int:
    """Return the members of a head group on one node."""
    block = route.ring_size if route.outer else route.heads
    if route.direct or (block % intra and intra % block):
        raise ValueError(f"no formula for {route} on nodes of {intra} ranks: they cut it into unequal parts")
    return max(1, intra // block) if route.outer else min(route.heads, intra)


def _crossing(route: Route, intra: int) -> float:
    """Return the share of the steps of an undivided ring that go to another node."""
    apart = 1 if route.outer else route.heads
    return 0.0 if route.ring_size * apart <= intra else min(1.0, apart / intra)
