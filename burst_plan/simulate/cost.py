"""The cost of a schedule: bytes by link, FLOPs, and seconds of kernel calls. Pure functions of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_mcore.attention.choose import COPIES
from burst_mcore.attention.geometry.rows import count
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule import route as route_module
from burst_mcore.attention.schedule.actions import Kind, Link, Pass, Program, Recv, Send
from burst_mcore.attention.schedule.route import Route
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates


@dataclass(frozen=True)
class Sizes:
    """Bytes of the messages of a pass."""

    whole: dict[Kind, int]
    """Bytes of all rows, by kind of message."""
    rows: int
    """Rows of a ring rank."""

    def of(self, action: Send | Recv) -> int:
        """Return the bytes of one message."""
        size = self.whole[action.channel.kind]
        return size if action.rows is None else size // self.rows * count(action.rows)


def message_bytes(shard: Shard, route: Route, pass_: Pass, *, return_lse: bool = False) -> Sizes:
    """Return the bytes of the messages in a pass, of the kinds that it has."""
    whole = route_module.message_bytes(shard, route, Pass(pass_), return_lse=return_lse)
    if Pass(pass_) == Pass.FORWARD:
        del whole[Kind.GRADIENT], whole[Kind.TOTAL]
    return Sizes(whole, shard.tokens * route.heads)


def link_bytes(program: Program, rank: int, sizes: Sizes, intra_size: int) -> dict[Link, int]:
    """Return the bytes that `rank` sends to its own node (INTRA) and to others (INTER)."""
    volumes = {Link.INTRA: 0, Link.INTER: 0}
    for action in program:
        if isinstance(action, Send):
            volumes[link_class(rank, action.peer, intra_size)] += sizes.of(action)
    return volumes


def bytes_of_all(programs: Sequence[Program], sizes: Sizes, intra_size: int) -> dict[Link, int]:
    """Return the sum of `link_bytes` over the ranks."""
    volumes = [link_bytes(program, rank, sizes, intra_size) for rank, program in enumerate(programs)]
    return {link: sum(each[link] for each in volumes) for link in (Link.INTRA, Link.INTER)}


def mean_bytes(programs: Sequence[Program], sizes: Sizes, intra_size: int) -> dict[Link, float]:
    """Return the mean of `link_bytes` over the ranks."""
    return {link: x / len(programs) for link, x in bytes_of_all(programs, sizes, intra_size).items()}


def link_class(rank: int, peer: int, intra_size: int) -> Link:
    """Return the link between two ranks: INTRA or INTER."""
    return Link.INTRA if rank // intra_size == peer // intra_size else Link.INTER


def stretched(link: Link, members: int, rates: Rates) -> float:
    """Return the slowdown of a message within a node that shares its link with other members' messages.

    Args:
        link: the kind of exchange that the message belongs to.
        members: ranks of a node that exchange with each other.
    """
    if link not in (Link.HEADS, Link.DIRECT):
        return 1.0
    return float(max(1.0, members / 2) ** rates.crowding)


def farther(rank: Tensor, peer: Tensor, rates: Rates) -> Tensor:
    """Return the slowdown of messages of a node against its fastest link (`Rates.levels`)."""
    times = torch.ones(rank.shape, dtype=torch.float64)
    for size, rate in rates.levels:
        crosses = rank // size != peer // size
        times = torch.where(crosses, times.clamp(min=rates.intra / rate), times)
    return times


PARCELS = (Kind.ROTATING_IN, Kind.STAYING_IN, Kind.STAYING_OUT, Kind.ROTATING_OUT)
"""Messages of an exchange of heads."""


def exchange_seconds(route: Route, sizes: Sizes, rates: Rates) -> float:
    """Return the seconds of the copies in an exchange of heads, without its messages."""
    if route.heads == 1:
        return 0.0
    parcels = sum(size for kind, size in sizes.whole.items() if kind in PARCELS)
    return COPIES * route.heads * parcels / rates.memory


def host_seconds(kernels: int, exchanges: int, rates: Rates) -> float:
    """Return the seconds in which the host launches a pass; the device works at the same time."""
    return (kernels + exchanges) * rates.call


def slowdown_seconds(sent: Mapping[Link, float], rates: Rates) -> float:
    """Return the seconds by which messages lengthen concurrent kernels; sent: bytes by link."""
    seconds = sum(size / rates.link(inter=link == Link.INTER) for link, size in sent.items())
    return rates.slowdown * seconds


def pass_flops(shard: Shard, pairs: int, pass_: Pass) -> int:
    """Return the FLOPs of `pairs` query-key pairs of each batch: 2 products in forward, 5 in backward."""
    d, dv = shard.head_dim, shard.value_dim
    width = d + dv if Pass(pass_) == Pass.FORWARD else 3 * d + 2 * dv
    return 2 * shard.batch * pairs * shard.heads * width


def allowed_pairs(mask: Mask, n: int) -> int:
    """Return the number of query-key pairs of the whole sequence that the mask allows."""
    return int(keys_per_query(mask, n).sum())
