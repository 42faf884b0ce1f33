"""The cost of a schedule: bytes by link, and FLOPs. Pure functions of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burst_mcore.attention.geometry.rows import count
from burst_mcore.attention.schedule.actions import Kind, Link, Pass, Program, Recv, Send
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.mask import Mask


@dataclass(frozen=True)
class Sizes:
    """Bytes of the messages of a pass."""

    whole: dict[Kind, int]
    """Bytes of all rows, by kind of message."""
    rows: int
    """Rows of a position on the ring."""

    def of(self, action: Send | Recv) -> int:
        """Return the bytes of one message."""
        size = self.whole[action.channel.kind]
        return size if action.rows is None else size // self.rows * count(action.rows)


def message_bytes(shard: Shard, route: Route, pass_: Pass, *, return_lse: bool = False) -> Sizes:
    """Return the bytes of the messages in a pass."""
    h, pass_ = route.heads, Pass(pass_)
    of_queries = pass_ == Pass.QUERY
    data, gradient = shard.pooled(h).bundle_bytes(of_queries=of_queries)
    rows, heads = shard.batch * shard.tokens, shard.heads // h
    kv_heads, several = max(1, shard.kv_heads // h), shard.kv_heads < h
    q = rows * heads * shard.head_dim * shard.itemsize
    kv = rows * kv_heads * (shard.head_dim + shard.value_dim) * shard.itemsize
    dkv = kv // shard.itemsize * (shard.grad_itemsize if several else shard.itemsize)
    out = rows * heads * shard.value_dim * shard.itemsize
    statistic = rows * heads * shard.statistic
    through_heads = {
        Pass.FORWARD: {Kind.BUNDLE: kv, Kind.ROWS: q, Kind.RESULT: out + statistic * return_lse},
        Pass.KV: {Kind.ROWS: out + statistic, Kind.RESULT: q, Kind.SUM: dkv},
        Pass.QUERY: {Kind.BUNDLE: out + statistic, Kind.RESULT: dkv, Kind.SUM: q},
    }
    summed_again = several and not of_queries  # over the members: see `Call.total_dtype`
    own = shard.grad_itemsize if summed_again else min(shard.itemsize, shard.grad_itemsize)
    total = gradient // shard.grad_itemsize * own
    whole = {Kind.DATA: data, Kind.GRADIENT: gradient, Kind.TOTAL: total, **through_heads[pass_]}
    return Sizes(whole, shard.tokens * h)


def link_bytes(program: Program, rank: int, sizes: Sizes, intra_size: int) -> dict[Link, int]:
    """Return the bytes that `rank` sends to its own node (INTRA) and to others (INTER)."""
    sent = {Link.INTRA: 0, Link.INTER: 0}
    for action in program:
        if isinstance(action, Send):
            sent[link_class(rank, action.peer, intra_size)] += sizes.of(action)
    return sent


def mean_bytes(programs: Sequence[Program], sizes: Sizes, intra_size: int) -> dict[Link, float]:
    """Return `link_bytes` of a rank, on average."""
    total = {Link.INTRA: 0.0, Link.INTER: 0.0}
    for rank, program in enumerate(programs):
        for link, size in link_bytes(program, rank, sizes, intra_size).items():
            total[link] += size / len(programs)
    return total


def link_class(rank: int, peer: int, intra_size: int) -> Link:
    """Return the link between two ranks: INTRA or INTER."""
    return Link.INTRA if rank // intra_size == peer // intra_size else Link.INTER


def pass_flops(shard: Shard, pairs: int, pass_: Pass) -> int:
    """Return the FLOPs of `pairs` query-key pairs of each batch: 2 products in forward, 5 in backward."""
    d, dv = shard.head_dim, shard.value_dim
    width = d + dv if Pass(pass_) == Pass.FORWARD else 3 * d + 2 * dv
    return 2 * shard.batch * pairs * shard.heads * width


def allowed_pairs(mask: Mask, n: int) -> int:
    """Return the query-key pairs of the whole sequence that may meet."""
    return int(keys_per_query(mask, n).sum())
