"""Closed formulas for the bytes that a rank sends: rings, shared heads, a mesh.

All h heads x a rows x b columns = G ranks are one family. Each rank has N / G tokens. Groups of h ranks pool
tokens and divide the heads. Queries and outputs pass the a groups that share a row of pairs, keys and values
the b groups that share a column. a = 1 is RingAttention, b = 1 the rotation of queries, h = G Ulysses.

The same formulas hold for what passes the NICs, with nodes in the place of ranks: a and b then count nodes.
Masks are full. `cost` counts the bytes of programs; tests hold the two against each other.

Between nodes (of 8), forward of 32 heads on 64, 256, 1024 ranks moves fewer bytes than a double ring:

    mesh of nodes, in bfloat16              1.56 / 2.7 / 5.0 times: sums of outputs are float32
    the same, in float32                    1.75 / 3.1 / 5.8
    heads across nodes as well              4 / 16 / 28.6, in float32 32 at 1024
    backward of 64 heads, 8 K/V heads       2.7 / 5.5 / 8.5

The last line has gradients in float32, and at most 8 ranks that share heads. The exchange of heads sends
complete gradients, rounded. In float32 they would make it 1.7 / 4.4 / 7.7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard


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
    """The size of a travelling gradient over that of the same numbers of Q, K or V."""
    output: float = 2.0
    """The size of a travelling share of an output, with its LSE, over that of the output."""

    @classmethod
    def of(cls, shard: Shard) -> Self:
        """Return the bytes of a rank's share of a call."""
        return cls(
            heads=shard.heads, kv_heads=shard.carried[0], q=shard.q_bytes, out=shard.out_bytes,
            kv=shard.kv_bytes, statistic=shard.statistic_bytes,
            gradient=shard.grad_itemsize / shard.itemsize, output=shard.share_bytes / shard.out_bytes,
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


class Hop(NamedTuple):
    """The bytes of a hop: what is read, the sum that follows, and that sum on its last hop."""

    data: float
    sums: float
    last: float

    def around(self, size: int) -> float:
        """Return the bytes of a rank on a ring: its own share stays, and the last hop is rounded."""
        return 0.0 if size == 1 else (size - 1) * self.data + (size - 2) * self.sums + self.last

    def between(self, nodes: int) -> float:
        """Return the bytes of a rank between nodes, if the last hop is one within a node."""
        return (nodes - 1) * (self.data + self.sums)


def of_rows(share: Share, pass_: Pass) -> Hop:
    """Return the hop of queries: Q, and O with its LSE; in backward Q, dO, D and LSE, and dQ."""
    if pass_ == Pass.FORWARD:
        sums = share.out * share.output
        return Hop(share.q, sums, sums)
    data, sums = share.q + share.out + 2 * share.statistic, share.q * share.gradient
    return Hop(data, sums, min(share.q, sums))


def pooled_kv(share: Share, heads: int) -> float:
    """Return the bytes of K and V of a group's tokens, of the heads of one member."""
    return share.kv * max(1.0, heads / share.kv_heads)


def of_columns(share: Share, pass_: Pass, heads: int = 1) -> Hop:
    """Return the hop of keys and values; in backward dK and dV follow."""
    data = pooled_kv(share, heads)
    if pass_ == Pass.FORWARD:
        return Hop(data, 0.0, 0.0)
    sums = data * share.gradient
    return Hop(data, sums, sums if heads > share.kv_heads else min(data, sums))


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


def moved(share: Share, pass_: Pass, *, heads: int = 1, rows: int = 1, columns: int = 1) -> float:
    """Return the bytes that each of heads x rows x columns ranks sends, to whomever."""
    exchange = (heads - 1) * exchanged(share, pass_, heads)
    return exchange + of_rows(share, pass_).around(rows) + of_columns(share, pass_, heads).around(columns)


def through_nic(
    share: Share, pass_: Pass, *, heads: int = 1, near: int = 1, rows: int = 1, columns: int = 1
) -> float:
    """Return the bytes that a rank sends to other nodes, where rings within nodes bring sums home.

    Args:
        share: the bytes of its rows.
        pass_: forward, or a backward.
        heads: ranks of a head group.
        near: those of them on one node.
        rows: nodes that share a row of pairs.
        columns: nodes that share a column.
    """
    exchange = (heads - near) * exchanged(share, pass_, heads)
    return exchange + of_rows(share, pass_).between(rows) + of_columns(share, pass_, heads).between(columns)


Links = dict[Link, float]
"""Bytes within and between nodes."""


def of_ring(share: Share, pass_: Pass, route: Route, intra: int) -> Links:
    """Return the bytes that a rank sends within and between nodes of `intra` ranks, on average.

    Raises:
        ValueError: a direct exchange, or nodes that cut head groups into unequal parts.
    """
    hop = of_rows(share, pass_) if pass_ == Pass.QUERY else of_columns(share, pass_, route.heads)
    return _joined(_of_heads(share, pass_, route, intra), _of_places(hop, route, intra))


def of_mesh(share: Share, pass_: Pass, route: Route, intra: int) -> Links:
    """Return the same of a mesh: its row's ring moves one side, the other goes straight along the column.

    Raises:
        ValueError: as `of_ring`, or nodes that cut rings into unequal parts.
    """
    shape, sides = route.of(pass_), (of_columns(share, pass_, route.heads), of_rows(share, pass_))
    moves, stays = sides[::-1] if pass_ == Pass.QUERY else sides
    step = shape.places * (1 if shape.outer else shape.heads)  # ranks between neighbours of a column
    if step % intra and intra % step:
        raise ValueError(f"no formula for {route} on nodes of {intra} ranks: they cut rings unequally")
    near = min(shape.rings, max(1, intra // step))
    one = stays.data + stays.sums
    column = {Link.INTRA: (near - 1) * one, Link.INTER: (shape.rings - near) * one}
    ring = _of_places(moves, shape, intra)
    return _joined(_of_heads(share, pass_, route, intra), ring, column)


def _joined(*parts: Links) -> Links:
    return {link: sum(part[link] for part in parts) for link in (Link.INTRA, Link.INTER)}


def _of_heads(share: Share, pass_: Pass, route: Route, intra: int) -> Links:
    """Return the bytes of the exchange of heads."""
    near = _near(route, intra)
    one = exchanged(share, pass_, route.heads) if route.heads > 1 else 0.0
    return {Link.INTRA: (near - 1) * one, Link.INTER: (route.heads - near) * one}


def _of_places(hop: Hop, route: Route, intra: int) -> Links:
    """Return the bytes of a ring, or of a double ring, over the places of a route."""
    if route.nodes > 1 and route.intra > 1:
        # The last hop takes the place of one of a sum.
        within = route.nodes * (route.intra - 1) * (hop.data + hop.sums) - hop.sums + hop.last
        return {Link.INTRA: within, Link.INTER: hop.between(route.nodes)}
    crossing, around = _crossing(route, intra), hop.around(route.places)
    return {Link.INTRA: (1 - crossing) * around, Link.INTER: crossing * around}


def _near(route: Route, intra: int) -> int:
    """Return the members of a head group on one node."""
    block = route.positions if route.outer else route.heads
    if route.direct or (block % intra and intra % block):
        raise ValueError(f"no formula for {route} on nodes of {intra} ranks: they cut it into unequal parts")
    return max(1, intra // block) if route.outer else min(route.heads, intra)


def _crossing(route: Route, intra: int) -> float:
    """Return the share of the hops of an undivided ring that go to another node."""
    apart = 1 if route.outer else route.heads
    return 0.0 if route.places * apart <= intra else min(1.0, apart / intra)
