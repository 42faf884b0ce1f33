"""The cost of a schedule: bytes by link, FLOPs, and seconds of kernel calls. Pure functions of shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burst_mcore.attention.candidates import expansion_seconds
from burst_mcore.attention.choose import COPIES
from burst_mcore.attention.geometry.rows import count
from burst_mcore.attention.schedule import route as route_module
from burst_mcore.attention.schedule.actions import Kind, Link, Pass, Program, Recv, Send
from burst_mcore.attention.schedule.route import Route
from burst_mcore.attention.shard import Shard
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates


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
    whole = route_module.message_bytes(shard, route, Pass(pass_), return_lse=return_lse)
    return Sizes(whole, shard.tokens * route.heads)


def link_bytes(program: Program, rank: int, sizes: Sizes, intra_size: int) -> dict[Link, int]:
    """Return the bytes that `rank` sends to its own node (INTRA) and to others (INTER)."""
    sent = {Link.INTRA: 0, Link.INTER: 0}
    for action in program:
        if isinstance(action, Send):
            sent[link_class(rank, action.peer, intra_size)] += sizes.of(action)
    return sent


def mean_bytes(programs: Sequence[Program], sizes: Sizes, intra_size: int) -> dict[Link, float]:
    """Return `link_bytes` of a rank, on average."""
    sent = [link_bytes(program, rank, sizes, intra_size) for rank, program in enumerate(programs)]
    return {link: sum(each[link] for each in sent) / len(sent) for link in (Link.INTRA, Link.INTER)}


def link_class(rank: int, peer: int, intra_size: int) -> Link:
    """Return the link between two ranks: INTRA or INTER."""
    return Link.INTRA if rank // intra_size == peer // intra_size else Link.INTER


def stretched(link: Link, members: int, rates: Rates) -> float:
    """Return how many times as long a message within a node takes as on a link of its own.

    Args:
        link: the kind of exchange that the message belongs to.
        members: ranks of a node that exchange with each other.
    """
    if link not in (Link.HEADS, Link.DIRECT):
        return 1.0
    return float(max(1.0, members / 2) ** rates.crowding)


def farther(rank: Tensor, peer: Tensor, rates: Rates) -> Tensor:
    """Return how many times as long messages of a node take as over its fastest link (`Rates.levels`)."""
    times = torch.ones(rank.shape, dtype=torch.float64)
    for size, rate in rates.levels:
        apart = rank // size != peer // size
        times = torch.where(apart, times.clamp(min=rates.intra / rate), times)
    return times


@dataclass(frozen=True)
class Passes:
    """Bytes of memory that passes around a kernel move, for each element of the result of a kernel call."""

    out: float
    """O, merged."""
    stays: float
    """A gradient, added to a sum that stays with its rank."""
    travels: float
    """A gradient, added to a sum that travels."""
    stand_in: float
    """O of a travelling query: a kernel that forms D itself gets a stand-in for O."""
    keys: float = 0.0
    """K and V, in forward, copied before a call."""


OURS = Passes(out=2.5, stays=2.5, travels=10.0, stand_in=3.3)
"""The passes of `forward` and `backward`, as tests/kernels/test_passes.py counts them on a ring of 8."""


@dataclass(frozen=True)
class CallTime:
    """Seconds of a kernel call and of the passes around it, by the size of its tile."""

    per_pair: float
    """Seconds of a query-key pair of all heads and of the whole batch."""
    per_row: float = 0.0
    """Seconds of a row that takes part: its share of the passes, of pipelines that fill and of idle ends."""

    def seconds(self, pairs: Tensor, rows: int) -> Tensor:
        """Return the seconds of calls, by their query-key pairs; rows: those of either side, at most.

        Rows that take part are taken to be the side of a triangle with as many pairs.
        """
        kernel = pairs * self.per_pair
        if not self.per_row:
            return kernel
        part = (2 * pairs).sqrt().clamp(max=rows)
        return kernel + part * self.per_row


def call_time(shard: Shard, pass_: Pass, rates: Rates, passes: Passes = OURS) -> CallTime:
    """Return the time of kernel calls in a pass over `shard`'s heads.

    A latent that travels is expanded for each bundle. Where latents stay, home's was expanded before.
    """
    forward = Pass(pass_) == Pass.FORWARD
    compute = rates.compute if forward else rates.backward or rates.compute
    softmax = shard.batch * shard.heads * (1 / rates.exponentials)
    computed = replace(
        shard, head_dim=rates.computed(shard.head_dim), value_dim=rates.computed(shard.value_dim)
    )
    per_pair = pass_flops(computed, 1, Pass(pass_)) / compute + softmax
    wave = rates.wave if forward or rates.wave_backward is None else rates.wave_backward
    idle = wave / 2 / (shard.batch * shard.heads)
    per_row = (rates.fill + idle) * per_pair + _bytes_around(shard, Pass(pass_), passes) / rates.memory
    if shard.latent_travels and Pass(pass_) != Pass.QUERY:
        per_row += expansion_seconds(shard, Pass(pass_), rates)
    return CallTime(per_pair, per_row)


def home_expansion_seconds(shard: Shard, pass_: Pass, rates: Rates) -> float:
    """Return the seconds to expand the rank's own rows alone, where K and V travel or stay."""
    if shard.latent_travels and Pass(pass_) != Pass.QUERY:
        return 0.0
    return shard.tokens * expansion_seconds(shard, Pass(pass_), rates)


def _bytes_around(shard: Shard, pass_: Pass, passes: Passes) -> float:
    """Return the bytes that passes move for a row that takes part in a kernel call, on both sides of it."""
    q, out = shard.batch * shard.heads * shard.head_dim, shard.batch * shard.heads * shard.value_dim
    kv = shard.batch * shard.kv_heads * (shard.head_dim + shard.value_dim)
    if pass_ == Pass.FORWARD:
        return passes.out * out + passes.keys * kv
    if pass_ == Pass.KV:
        if shard.latent_travels:
            return passes.stays * (q + kv) + passes.travels * shard.batch * math.prod(shard.carried)
        return passes.stays * q + passes.travels * kv
    return passes.travels * q + passes.stays * kv + passes.stand_in * out


PARCELS = (Kind.BUNDLE, Kind.ROWS, Kind.RESULT, Kind.SUM)
"""Messages of an exchange of heads."""


def exchange_seconds(route: Route, sizes: Sizes, rates: Rates) -> float:
    """Return the seconds that the exchange of heads takes besides its messages: those of copies."""
    if route.heads == 1:
        return 0.0
    parcels = sum(size for kind, size in sizes.whole.items() if kind in PARCELS)
    return COPIES * route.heads * parcels / rates.memory


def host_seconds(kernels: int, exchanges: int, rates: Rates) -> float:
    """Return the seconds in which the host launches a pass, beside the device: it runs ahead."""
    return (kernels + exchanges) * rates.call


def slowdown_seconds(sent: Mapping[Link, float], rates: Rates) -> float:
    """Return the seconds by which messages lengthen the kernels that run beside them; sent: bytes by link."""
    seconds = sum(size / rates.link(inter=link == Link.INTER) for link, size in sent.items())
    return rates.slowdown * seconds


def pass_flops(shard: Shard, pairs: int, pass_: Pass) -> int:
    """Return the FLOPs of `pairs` query-key pairs of each batch: 2 products in forward, 5 in backward."""
    d, dv = shard.head_dim, shard.value_dim
    width = d + dv if Pass(pass_) == Pass.FORWARD else 3 * d + 2 * dv
    return 2 * shard.batch * pairs * shard.heads * width


def allowed_pairs(mask: Mask, n: int) -> int:
    """Return the query-key pairs of the whole sequence that may meet."""
    return int(keys_per_query(mask, n).sum())
