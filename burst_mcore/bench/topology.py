"""The paper's claims about topology and overlap, measured in wall time on an emulated cluster.

Messages are real: they go through burst_attention, gloo and shaped links. The kernel is modelled: a timed
wait in its place, as long as its FLOPs take at a given rate, since two cores cannot compute for eight ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.autotune.choose import RINGS, Candidate, Ranks, best, candidates, legal_degrees
from burst_mcore.attention.autotune.cost import allowed_pairs, pass_flops
from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.kernels.kernel import Kernel, RowGradients, Scores
from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.attention.prepare import call_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.shard import Shard
from burst_mcore.bench import cluster, provenance
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

WITHIN = 1.05
"""The choice of the cost model is right if it is at most so much slower than the fastest measured."""
BARS = {"double ring, 2 x 2": 2.2, "double ring, 2 x 4": 4.5, "overlap, 2 x 4": 1.5, "choice": 0.9}
"""What the measurements must reach: flat / double, off / on, and the share of right choices."""
CLEARLY = 1.5
"""A way that takes so many times as long as the fastest is measured once: more would change nothing."""
FREE = 1e18
"""FLOP/s at which compute takes no time."""
LINKS = ((20e6, 1e6), (10e6, 2e6), (2e6, 2e6))
"""Bytes a second, (within the node, between nodes), that the grid covers: slow beside the cores, which copy
and merge for all ranks."""
SHAPES = ((8, 512), (2, 1024))
"""(K/V heads, tokens of a rank) that the grid covers: large enough for links to take longer than the host,
which serves a call of 8 ranks on 2 cores in about 0.2 s."""


@dataclass(frozen=True)
class Case:
    """One attention layer on one cluster, float32, zigzag."""

    nodes: int
    intra: int
    rates: Rates
    heads: int = 8
    kv_heads: int = 8
    tokens: int = 256
    """Of a rank."""
    head_dim: int = 32
    mask: str = "causal"
    """Or "full"."""

    @property
    def seen(self) -> Mask:
        return Mask.full() if self.mask == "full" else Mask.causal()

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.nodes * self.intra, self.intra)

    @property
    def shard(self) -> Shard:
        return Shard(
            batch=1,
            tokens=self.tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            dtype=torch.float32,
        )

    def candidates(self, config: BurstConfig) -> tuple[Candidate, ...]:
        """What `config` leaves to choose from, costed."""
        degree, backward = config.head_parallel, config.backward
        degrees = legal_degrees(self.ranks, self.heads, self.kv_heads)
        return candidates(
            self.shard,
            Layout.of(config.layout),
            self.seen,
            self.tokens * self.ranks.size,
            self.ranks,
            self.rates,
            overlap=config.overlap,
            rings=RINGS if config.ring == "auto" else (config.ring,),
            degrees=tuple(degrees) if degree == "auto" else (int(degree),),
            directions=("query", "kv") if backward == "auto" else (backward,),
        )

    def predicted(self, config: BurstConfig) -> float:
        """Seconds of the way that runs with `config`."""
        return best(self.candidates(config)).seconds

    def with_compute(self, of_hop: float) -> Case:
        """The same with a kernel whose forward of one round takes `of_hop` hops of K, V between nodes."""
        size = self.ranks.size
        pairs = allowed_pairs(self.seen, self.tokens * size) // size // self.nodes
        hop = self.shard.bundle_bytes("kv")[0] / self.rates.inter
        compute = pass_flops(self.shard, pairs, "forward") / (of_hop * hop) if of_hop else FREE
        return replace(self, rates=replace(self.rates, compute=compute))


@dataclass(frozen=True)
class Timing:
    """Wall seconds of a forward and backward, the slowest rank's, median over repeats."""

    case: Case
    config: BurstConfig
    measured: float
    predicted: float

    def row(self) -> dict[str, Any]:
        c = self.case
        return {
            "cluster": f"{c.nodes} x {c.intra}",
            "intra MB/s": c.rates.intra / 1e6,
            "inter MB/s": c.rates.inter / 1e6,
            "kernel GFLOP/s": None if c.rates.compute == FREE else c.rates.compute / 1e9,
            "heads": f"{c.heads}:{c.kv_heads}",
            "ring": self.config.ring,
            "head_parallel": self.config.head_parallel,
            "backward": self.config.backward,
            "overlap": self.config.overlap,
            "mask": c.mask,
            "tokens a rank": c.tokens,
            "head_dim": c.head_dim,
            "latency us": c.rates.latency * 1e6,
            "measured ms": self.measured * 1e3,
            "predicted ms": self.predicted * 1e3,
        }


def timing_of(row: Mapping[str, Any]) -> Timing:
    """The timing of which `Timing.row` made a row, with what today's code predicts."""
    nodes, intra = (int(x) for x in row["cluster"].split(" x "))
    heads, kv_heads = (int(x) for x in row["heads"].split(":"))
    kernel = row["kernel GFLOP/s"]
    rates = Rates(
        intra=row["intra MB/s"] * 1e6,
        inter=row["inter MB/s"] * 1e6,
        compute=FREE if kernel is None else kernel * 1e9,
        latency=row["latency us"] / 1e6,
    )
    case = Case(nodes, intra, rates, heads, kv_heads, row["tokens a rank"], row["head_dim"], row["mask"])
    config = BurstConfig(**{name: row[name] for name in ("ring", "head_parallel", "backward", "overlap")})
    return Timing(case, config, row["measured ms"] / 1e3, case.predicted(config))


@dataclass(frozen=True)
class Verdict:
    """A figure beside the bar that it must reach."""

    claim: str
    value: float
    bar: float
    timings: Sequence[Timing]

    @property
    def reached(self) -> bool:
        return self.value >= self.bar


def all_verdicts(repeats: int, say: Callable[[str], None]) -> list[Verdict]:
    """Every claim, measured one after another; `say` gets a line for each as it comes."""
    verdicts = []
    for verdict in (*double_against_flat(repeats), overlap_on_against_off(repeats)):
        say(f"{verdict.claim}: {verdict.value:.2f} times as fast")
        verdicts.append(verdict)
    return [*verdicts, choices(repeats, say)]


def double_against_flat(repeats: int) -> Iterator[Verdict]:
    """Communication alone, inter-node links 20 x slower: as many bytes in data and in gradients.

    Without a mask, so that all rows travel all the way: under a causal one the flat ring drops more of them.
    """
    links = Rates(intra=LINKS[0][0], inter=LINKS[0][1], compute=FREE, latency=0.0)
    for nodes, intra in ((2, 2), (2, 4)):
        rings = [BurstConfig(kernel="timed", backward="kv", ring=ring) for ring in ("flat", "double")]
        case = Case(nodes, intra, links, tokens=128, mask="full")
        flat, double = measure([(case, rings)], repeats)[0]
        claim = f"double ring, {nodes} x {intra}"
        yield Verdict(claim, flat.measured / double.measured, BARS[claim], (flat, double))


def overlap_on_against_off(repeats: int) -> Verdict:
    """The double ring with and without overlap, at the compute where the model says that it matters most."""
    links = Rates(intra=LINKS[0][0], inter=LINKS[0][1], compute=FREE, latency=0.0)
    on, off = (
        BurstConfig(kernel="timed", ring="double", backward="kv", overlap=overlap)
        for overlap in (True, False)
    )

    def gain(case: Case) -> float:
        return case.predicted(off) / case.predicted(on)

    case = Case(2, 4, links, tokens=128)
    case = max((case.with_compute(n / 8) for n in range(2, 25)), key=gain)
    with_overlap, without = measure([(case, [on, off])], repeats)[0]
    claim = "overlap, 2 x 4"
    return Verdict(claim, without.measured / with_overlap.measured, BARS[claim], (with_overlap, without))


AUTO = BurstConfig(kernel="timed", ring="auto", head_parallel="auto", backward="auto")
"""All left to the cost model."""


def choices(repeats: int, say: Callable[[str], None]) -> Verdict:
    """Over a grid of clusters, links, shapes and kernels: is what "auto" takes the fastest?"""
    timings, right, cells = [], 0, 0
    for (nodes, intra), (within, between) in itertools.product(((2, 2), (2, 4)), LINKS):
        links = Rates(intra=within, inter=between, compute=FREE, latency=0.0)
        cases = [
            Case(nodes, intra, links, kv_heads=kv_heads, tokens=tokens).with_compute(of_hop)
            for (kv_heads, tokens), of_hop in itertools.product(SHAPES, (0, 0.5))
        ]
        work = [(case, [AUTO, *(_config(way) for way in _ways(case))]) for case in cases]
        for auto, *others in measure(work, repeats):
            fastest = min(others, key=lambda timing: timing.measured)
            cells += 1
            right += auto.measured <= WITHIN * fastest.measured
            timings += [auto, *others]
            say(_line(auto, fastest))
    return Verdict("choice", right / cells, BARS["choice"], timings)


def _ways(case: Case) -> list[Candidate]:
    """All but flat rings and direct exchanges that share heads: slow everywhere, and half of the time."""
    every = case.candidates(BurstConfig(ring="auto", head_parallel="auto"))
    return [way for way in every if way.ring == "double" or way.route.heads == 1]


def _config(way: Candidate) -> BurstConfig:
    return BurstConfig(kernel="timed", ring=way.ring, head_parallel=way.route.heads, backward=way.direction)


def _line(auto: Timing, fastest: Timing) -> str:
    row, slower = auto.row(), auto.measured / fastest.measured - 1
    where = f"{row['cluster']}, {row['intra MB/s']:g} and {row['inter MB/s']:g} MB/s, heads {row['heads']}"
    times = f"{auto.measured * 1e3:.0f} ms, predicted {auto.predicted * 1e3:.0f}"
    picked = f"auto takes {best(auto.case.candidates(auto.config))} ({times})"
    other = f"{fastest.config.ring}, head_parallel={fastest.config.head_parallel}, {fastest.config.backward}"
    return (
        f"{where}: {picked}; the fastest, {other}, {abs(slower):.1%} {'faster' if slower > 0 else 'slower'}"
    )


def measure(work: Sequence[tuple[Case, Sequence[BurstConfig]]], repeats: int) -> list[list[Timing]]:
    """Run all cases, which must have the same cluster and links, with all their configurations in turn.

    The time that a message takes besides its bytes is measured first, and given to the cost model. A
    configuration that is clearly slower than another (`CLEARLY`) is measured once.
    """
    first = work[0][0]
    latency, seconds = cluster.run(first.ranks, first.rates, _measure, work, repeats)[0]
    timings = []
    for (case, configs), walls in zip(work, seconds, strict=True):
        case = replace(case, rates=replace(case.rates, latency=latency))
        timings.append(
            [
                Timing(case, config, statistics.median(wall), case.predicted(config))
                for config, wall in zip(configs, walls, strict=True)
            ]
        )
    return timings


def _measure(
    rank: int, size: int, work: Sequence[tuple[Case, Sequence[BurstConfig]]], repeats: int
) -> tuple[float, list[list[list[float]]]]:
    """(latency, wall seconds by case, configuration and repeat); the same on every rank."""
    latency = _latency(rank, size)
    known = [(replace(case, rates=replace(case.rates, latency=latency)), configs) for case, configs in work]
    return latency, [_time_in_turn(rank, case, configs, repeats) for case, configs in known]


def _latency(rank: int, size: int) -> float:
    """Seconds of a hop around all ranks with a message of a few bytes."""
    out, into = torch.zeros(16), torch.zeros(16)
    seconds = []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        hop = [
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
            dist.P2POp(dist.isend, out, (rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(hop):
            work.wait()
        seconds.append(time.perf_counter() - start)
    median = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(median)
    return median.item() / size


def _time_in_turn(rank: int, case: Case, configs: Sequence[BurstConfig], repeats: int) -> list[list[float]]:
    """Wall seconds by configuration and repeat, the slowest rank's.

    Before them a small round, and a first that counts for ways that are clearly slower alone: it plans.
    """
    KERNELS["timed"] = timed_kernel(case.rates.compute)
    choose.cache_clear()  # it remembers the kernel of the case before
    call_of.cache_clear()
    topology = Topology.from_group(
        dist.group.WORLD,  # type: ignore[arg-type]
        intra_size=case.intra,
        rates=case.rates,
    )
    small = replace(case, tokens=max(16, case.tokens // 8))
    for config in configs:
        _time(rank, small, config, topology)
    first = [_time(rank, case, config, topology) for config in configs]
    near = [
        index for index, wall in enumerate(first)
        if wall <= CLEARLY * min(first) or configs[index].ring == "auto"  # whose first call decides
    ]  # fmt: skip
    walls = [[] if index in near else [wall] for index, wall in enumerate(first)]
    for _ in range(repeats):
        for index in near:
            walls[index].append(_time(rank, case, configs[index], topology))
    return walls


def _time(rank: int, case: Case, config: BurstConfig, topology: Topology) -> float:
    """Wall seconds of a forward and backward, the slowest rank's."""
    generator = torch.Generator().manual_seed(rank)

    def draw(heads: int) -> Tensor:
        return torch.randn(1, case.tokens, heads, case.head_dim, generator=generator).requires_grad_()

    q, k, v = draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)
    dist.barrier()
    start = time.perf_counter()
    out = burst_attention(q, k, v, topology=topology, mask=case.seen, config=config)
    assert isinstance(out, Tensor)
    out.backward(torch.ones_like(out))
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def timed_kernel(rate: float) -> Kernel:
    """A kernel that takes as long as its FLOPs at `rate` FLOP/s, and computes nothing."""

    def wait(q: Tensor, k: Tensor, v: Tensor, seen: Seen, name: str) -> None:
        rows, columns = q.shape[1], k.shape[1]
        pairs = rows * (rows + 1) // 2 if seen.causal else rows * columns
        shard = Shard(
            batch=q.shape[0],
            tokens=rows,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
        )
        time.sleep(pass_flops(shard, pairs, name) / rate)

    def forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
        wait(q, k, v, seen, "forward")
        batch, rows, heads, _ = q.shape
        return q.new_zeros(batch, rows, heads, v.shape[3]), q.new_zeros(batch, heads, rows)

    def backward(x: RowGradients, seen: Seen, how: Scores) -> tuple[Tensor, Tensor, Tensor]:
        wait(x.q, x.k, x.v, seen, "kv")
        return torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v)

    return Kernel("timed", lambda problem: None, forward, backward, takes_delta=True)


def report(verdicts: Sequence[Verdict]) -> str:
    """The figures beside their bars."""
    rows = [
        {
            "claim": verdict.claim,
            "measured": verdict.value,
            "bar": verdict.bar,
            "": "reached" if verdict.reached else "MISSED",
        }
        for verdict in verdicts
    ]
    text: str = tabulate(rows, headers="keys", floatfmt=".3g")
    return text


def as_json(verdicts: Sequence[Verdict]) -> str:
    """All figures, and what they are of."""
    judged = [
        {
            "claim": verdict.claim,
            "value": verdict.value,
            "bar": verdict.bar,
            "reached": verdict.reached,
            "timings": [timing.row() for timing in verdict.timings],
        }
        for verdict in verdicts
    ]
    return provenance.as_json(
        "wall time of burst_attention, forward and backward, on an emulated cluster: gloo over shaped links "
        "between network namespaces, a timed wait in the place of the kernel",
        verdicts=judged,
    )
