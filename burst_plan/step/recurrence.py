"""Recurrences and convolutions over ranks: work and bytes of the busiest rank, and costs of exchanges.

The programs of `burst_mcore.recurrent` give the messages of each rank; backward sends as much. No compute
hides messages: a step takes as long as the rank that receives most. Compositions of maps are not counted.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.actions import Recv
from burst_mcore.layout import Layout
from burst_mcore.rates import Rates
from burst_mcore.recurrent.fragments import fragments
from burst_mcore.recurrent.halo import halo
from burst_mcore.recurrent.programs import Exchange, size_of
from burst_mcore.recurrent.scan import scan
from burst_plan.step.model import Mixer, Model


class Work(NamedTuple):
    """Work and bytes of a layer on the busiest rank: per token, multiply-adds and elements in 16 bits."""

    products: float
    """In forward, without the multiply-adds of matrices."""
    back: float
    """Multiply-adds of the kernel calls in backward: all but A's, and twice those of the middle."""
    kept: float
    """Elements saved for backward: of one kernel call, since A and B have no graph."""
    states: float
    """Bytes of states and of A that fragments save."""
    moved: tuple[float, float]
    """Elements that further kernel calls, and scans by doubling, write and read: in forward, in backward."""


@lru_cache(maxsize=1024)
def work(mixer: Mixer, layout: str, seq: int, ranks: int) -> Work:
    """Return the work of a sequence of one document. Raises ValueError for a layout that scatters tokens."""
    sharded, counts, again = Layout.of(layout), Counter[int](), Counter[int]()
    padded, longest = sharded.padded(seq, ranks), 1
    for each in fragments(sharded, padded, ranks):
        longest = max(longest, len(each.rows))
        counts[each.rank] += 1
        again[each.rank] += len(each.rows) * (not each.begins and not each.ends)
    sizes, share = mixer.recurrence, max(again.values()) * ranks / padded
    back = mixer.width * mixer.channels + sizes.kernel * (1 + share)
    further = share * (2 if sizes.maps else 1), share  # for B, and for A if it is a matrix; once more
    states = 4.0 * max(counts.values()) * (sizes.state + sizes.decay) * (ranks > 1)
    doubled = sizes.doubled * ceil(log2(longest))
    forth, home = (doubled * (1 + runs) + 2 * sizes.run * runs for runs in further)
    return Work(back + sizes.maps * share, back, mixer.kept + sizes.run, states, (forth, home))


@lru_cache(maxsize=1024)
def exchanges(
    mixer: Mixer, layout: str, seq: int, ranks: Ranks, rates: Rates
) -> dict[str, tuple[int, float]]:
    """Return the exchanges of a layer's pass, by name: (bytes that the busiest rank receives, seconds)."""
    sharded, result = Layout.of(layout), {}
    where = sharded, sharded.padded(seq, ranks.size), ranks.size, ranks.intra
    if state := mixer.recurrence.state:
        sizes = {"state": 4 * state, "decay": 4 * mixer.recurrence.decay}
        result["scan of states"] = _received(scan(*where), rates, **sizes)
    if mixer.width:
        result["halo"] = _received(halo(*where, reach=mixer.width - 1), rates, row=2 * mixer.channels)
    return result


def _received(exchange: Exchange, rates: Rates, **sizes: int) -> tuple[int, float]:
    volumes, steps = Counter[tuple[int, int, bool]](), dict[int, float]()
    for rank, program in enumerate(exchange.programs):
        for action in program:
            if isinstance(action, Recv):
                inter = rank // exchange.intra != action.peer // exchange.intra
                volumes[action.step, rank, inter] += size_of(action, **sizes)
    for (step, _, inter), size in volumes.items():
        steps[step] = max(steps.get(step, 0.0), rates.latency + size / rates.link(inter=inter))
    maximum = max(exchange.received(rank, **sizes) for rank in range(len(exchange.programs)))
    return maximum, sum(steps.values())


def told(model: Model, layout: str, seq: int, ranks: Ranks, rates: Rates) -> list[str]:
    """Return notes on a hybrid model's layers, and the time of layers without attention. Raises as `work`."""
    if not (mixer := model.mixer).layers:
        return []
    load, costs = work(mixer, layout, seq, ranks.size), exchanges(mixer, layout, seq, ranks, rates)
    flops, saved_bytes = 2 * (mixer.matrices + load.products), 2 * load.kept
    volumes = " and ".join(f"{size / 1e6:.3g} MB of a {name}" for name, (size, _) in costs.items())
    words = (
        f"layers: {model.attending} with attention, {mixer.layers} with a {mixer.kind}; each of these has "
        f"{(mixer.matrices + mixer.others) / 1e6:.3g} million parameters, a token takes "
        f"{flops / 1e6:.3g} MFLOPs in forward and keeps {saved_bytes / 1e3:.3g} KB"
    )
    return [words + f"; in a pass the busiest rank receives {volumes} (predicted)" * (ranks.size > 1)]
