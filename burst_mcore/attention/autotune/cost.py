"""What a schedule costs: bytes by link, and FLOPs. Pure functions of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burst_mcore.attention.geometry.rows import count
from burst_mcore.attention.schedule.actions import (
    BUNDLE,
    DATA,
    GRADIENT,
    RESULT,
    ROWS,
    SUM,
    Program,
    Recv,
    Send,
)
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.mask import Mask


@dataclass(frozen=True)
class Sizes:
    """Bytes of the messages of a pass."""

    whole: dict[str, int]
    """By kind, of all rows."""
    rows: int
    """Of a position on the ring."""

    def of(self, action: Send | Recv) -> int:
        """Of one message."""
        size = self.whole[action.channel.what]
        return size if action.rows is None else size // self.rows * count(action.rows)


def message_bytes(shard: Shard, route: Route, name: str, *, return_lse: bool = False) -> Sizes:
    """Bytes of the messages in the pass `name`: "forward", "query" or "kv"."""
    h = route.heads
    data, gradient = shard.pooled(h).bundle_bytes("query" if name == "query" else "kv")
    rows, heads = shard.batch * shard.tokens, shard.heads // h
    kv_heads, several = max(1, shard.kv_heads // h), shard.kv_heads < h
    q = rows * heads * shard.head_dim * shard.itemsize
    kv = rows * kv_heads * (shard.head_dim + shard.value_dim) * shard.itemsize
    dkv = kv // shard.itemsize * (shard.grad_itemsize if several else shard.itemsize)
    out = rows * heads * shard.value_dim * shard.itemsize
    statistic = rows * heads * shard.statistic
    through_heads = {
        "forward": {BUNDLE: kv, ROWS: q, RESULT: out + statistic * return_lse},
        "kv": {ROWS: out + statistic, RESULT: q, SUM: dkv},
        "query": {BUNDLE: out + statistic, RESULT: dkv, SUM: q},
    }
    return Sizes({DATA: data, GRADIENT: gradient, **through_heads[name]}, shard.tokens * h)


def link_bytes(program: Program, rank: int, sizes: Sizes, intra_size: int) -> dict[str, int]:
    """Bytes that `rank` sends to its own node ("intra") and to others ("inter"), nodes of `intra_size`."""
    sent = {"intra": 0, "inter": 0}
    for action in program:
        if isinstance(action, Send):
            sent[link_class(rank, action.peer, intra_size)] += sizes.of(action)
    return sent


def mean_bytes(programs: Sequence[Program], sizes: Sizes, intra_size: int) -> dict[str, float]:
    """`link_bytes` of a rank, on average."""
    total = {"intra": 0.0, "inter": 0.0}
    for rank, program in enumerate(programs):
        for link, size in link_bytes(program, rank, sizes, intra_size).items():
            total[link] += size / len(programs)
    return total


def link_class(rank: int, peer: int, intra_size: int) -> str:
    """The link between two ranks: "intra" or "inter"."""
    return "intra" if rank // intra_size == peer // intra_size else "inter"


def pass_flops(shard: Shard, pairs: int, name: str) -> int:
    """FLOPs of `pairs` query-key pairs of each batch: 2 products in forward, 5 in backward."""
    d, dv = shard.head_dim, shard.value_dim
    width = d + dv if name == "forward" else 3 * d + 2 * dv
    return 2 * shard.batch * pairs * shard.heads * width


def allowed_pairs(mask: Mask, n: int) -> int:
    """Query-key pairs of the whole sequence that may meet."""
    return int(keys_per_query(mask, n).sum())
