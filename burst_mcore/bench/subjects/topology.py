"""The paper's claims about topology and overlap, measured in wall time on an emulated cluster.

Messages are real: they go through burst_attention, gloo and shaped links. The kernel is modelled: a timed
wait in its place, as long as its FLOPs take at a given rate, since two cores cannot compute for eight ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.autotune.choose import (
    RINGS,
    Candidate,
    Ranks,
    backward_passes,
    best,
    candidates,
    legal_degrees,
)
from burst_mcore.attention.autotune.cost import allowed_pairs, pass_flops
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores
from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.attention.prepare import call_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.core import (
    ALL,
    Bar,
    Case,
    Derived,
    Method,
    Stage,
    Subject,
    Table,
    Trial,
    World,
    column,
    in_words,
)
from burst_mcore.bench.methods.attention import attended
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import Rates

WITHIN = 1.05
"""The choice of the cost model is right if it is at most so much slower than the fastest measured."""
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
FLAT, DOUBLE = "ring=flat; backward=kv", "ring=double; backward=kv"
OFF = f"{DOUBLE}; overlap=False"
AUTO = "ring=auto; head_parallel=auto; backward=auto"
"""All left to the cost model."""


@dataclass(frozen=True, kw_only=True)
class ClusterCase(Case):
    """One attention layer on one cluster, float32, zigzag."""

    nodes: int = 2
    intra: int = 2
    """Ranks of a node."""
    intra_rate: float = LINKS[0][0]
    """Bytes a second that a rank sends within its node."""
    inter_rate: float = LINKS[0][1]
    """To other nodes."""
    compute: float = FREE
    """FLOP/s of the modelled kernel."""
    heads: int = 8
    kv_heads: int = 8
    tokens: int = 256
    """Of a rank."""
    head_dim: int = 32
    mask: str = "causal"
    """Or "full"."""
    ways: str = ""
    """What is measured: settings of BurstConfig, separated by |; "": every way, and what "auto" takes."""

    @property
    def seen(self) -> Mask:
        return Mask.full() if self.mask == "full" else Mask.causal()

    @property
    def cluster(self) -> Ranks:
        """All ranks, and those of a node."""
        return Ranks(self.nodes * self.intra, self.intra)

    @property
    def rates(self) -> Rates:
        """Of links and kernel, without the time that a message takes besides its bytes."""
        return Rates(intra=self.intra_rate, inter=self.inter_rate, compute=self.compute, latency=0.0)

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

    def with_compute(self, of_hop: float) -> ClusterCase:
        """Return the case with a kernel whose forward of a round takes `of_hop` hops of K and V."""
        size = self.cluster.size
        pairs = allowed_pairs(self.seen, self.tokens * size) // size // self.nodes
        hop = self.shard.bundle_bytes(of_queries=False)[0] / self.inter_rate
        compute = pass_flops(self.shard, pairs, Pass.FORWARD) / (of_hop * hop) if of_hop else FREE
        return replace(self, compute=compute)


def config_of(way: str) -> BurstConfig:
    """Return the configuration of a way, such as "ring=double; backward=kv"."""
    return in_words(BurstConfig, way, kernel="timed")


@lru_cache(maxsize=4096)
def costed(case: ClusterCase, way: str, latency: float) -> tuple[Candidate, ...]:
    """Return the candidates that a way leaves open; `latency`: seconds of a message besides its bytes."""
    config = config_of(way)
    degree, backward = config.head_parallel, config.backward
    return candidates(
        case.shard,
        Layout.of(config.layout),
        case.seen,
        case.tokens * case.cluster.size,
        case.cluster,
        replace(case.rates, latency=latency),
        overlap=config.overlap,
        rings=RINGS if config.ring == "auto" else (config.ring,),
        degrees=tuple(legal_degrees(case.cluster, case.heads, case.kv_heads))
        if degree == "auto"
        else (int(degree),),
        directions=backward_passes(backward),
    )


def predicted(case: ClusterCase, way: str, latency: float) -> float:
    """Seconds that a way takes by today's cost model."""
    return best(costed(case, way, latency)).seconds


def _ways(case: ClusterCase) -> list[str]:
    """Return all ways but flat rings and direct exchanges that share heads, which are slow everywhere."""
    if case.ways:
        return [way.strip() for way in case.ways.split("|")]
    every = costed(case, "ring=auto; head_parallel=auto", 0.0)
    ways = [way for way in every if way.ring == "double" or way.route.heads == 1]
    return [AUTO, *(f"ring={w.ring}; head_parallel={w.route.heads}; backward={w.direction}" for w in ways)]


def _build(case: ClusterCase, world: World, way: str) -> BurstConfig:
    return config_of(way)


def _methods(case: ClusterCase) -> Mapping[str, Method]:
    return {way: Method(way, partial(_build, way=way)) for way in _ways(case)}


def _stage(case: ClusterCase, world: World) -> Stage:
    latency = _latency(world)
    KERNELS["timed"] = timed_kernel(case.compute)
    choose.cache_clear()  # kernels and calls that are remembered name the kernel of the case before
    call_of.cache_clear()
    rates = replace(case.rates, latency=latency)
    topology = Topology.from_group(world.group, intra_size=case.intra, rates=rates)

    def trial(method: Method) -> Trial:
        config: BurstConfig = method.build(case, world)
        steps = [_step(part, config, topology, world) for part in (case, _small(case))]
        # What is left to the cost model is decided in the first call, which counts where a way is far behind.
        return Trial({"": steps[0]}, warm=steps[config.ring != "auto"])

    return Stage(trial, facts={("message", "hop"): latency})


def _small(case: ClusterCase) -> ClusterCase:
    return replace(case, tokens=max(16, case.tokens // 8))


def _step(case: ClusterCase, config: BurstConfig, topology: Topology, world: World) -> Any:
    """Return a step of one forward and backward."""
    generator = torch.Generator().manual_seed(world.rank)

    def draw(heads: int) -> Tensor:
        return torch.randn(1, case.tokens, heads, case.head_dim, generator=generator).requires_grad_()

    q, k, v = draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)
    dout = torch.ones_like(q)

    def run() -> None:
        q.grad = k.grad = v.grad = None
        attended(q, k, v, topology=topology, mask=case.seen, config=config).backward(dout)

    return run


def _latency(world: World) -> float:
    """Seconds of a hop around all ranks with a message of a few bytes."""
    out, into, rank, size = torch.zeros(16), torch.zeros(16), world.rank, world.size
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


def timed_kernel(rate: float) -> Kernel:
    """Return a kernel that takes as long as its FLOPs at `rate` FLOP/s, and computes nothing."""

    def wait(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, pass_: Pass) -> None:
        rows, columns = q.shape[1], k.shape[1]
        pairs = rows * (rows + 1) // 2 if pattern.causal else rows * columns
        shard = Shard(
            batch=q.shape[0],
            tokens=rows,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            dtype=q.dtype,
        )
        time.sleep(pass_flops(shard, pairs, pass_) / rate)

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
        wait(q, k, v, pattern, Pass.FORWARD)
        batch, rows, heads, _ = q.shape
        return q.new_zeros(batch, rows, heads, v.shape[3]), q.new_zeros(batch, heads, rows)

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        wait(inputs.q, inputs.k, inputs.v, pattern, Pass.KV)
        return torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)

    return Kernel("timed", lambda problem: None, forward, backward, takes_delta=True)


def _derive(case: ClusterCase, table: Table) -> Derived:
    """Yield the cost model's prediction for each way, and the ways beside each other."""
    latency = table["message", "hop"][0]
    walls = column(table, "wall")
    for way, samples in walls.items():
        forecast = predicted(case, way, latency)
        yield way, "predicted", [forecast]
        yield way, "wall / predicted", [statistics.median(samples) / forecast]
    for slow, fast in ((FLAT, DOUBLE), (OFF, DOUBLE)):
        if slow in walls and fast in walls:
            yield fast, f"{slow} / this", [statistics.median(walls[slow]) / statistics.median(walls[fast])]
    others = [statistics.median(samples) for way, samples in walls.items() if way != AUTO]
    if AUTO in walls and others:
        yield AUTO, "wall / fastest", [statistics.median(walls[AUTO]) / min(others)]


def _summary(tables: Mapping[str, Table]) -> Derived:
    """Return the share of the cells in which the choice of "auto" is as fast as the fastest way."""
    ratios = [
        table[AUTO, "wall / fastest"][0] for table in tables.values() if (AUTO, "wall / fastest") in table
    ]
    if ratios:
        yield AUTO, "right choices / cells", [sum(ratio <= WITHIN for ratio in ratios) / len(ratios)]


def _cases(device: str) -> Mapping[str, ClusterCase]:
    """Return the rings without compute, overlap where it matters most, and a grid of cells for "auto".

    The rings are compared without a mask, so that all rows travel all the way: under a causal one the flat
    ring drops more of them. Data and gradients are as many bytes: "kv" travels.
    """
    cases = {
        f"double ring, 2 x {intra}": ClusterCase(
            intra=intra, tokens=128, mask="full", ways=f"{FLAT} | {DOUBLE}"
        )
        for intra in (2, 4)
    }
    alone = ClusterCase(intra=4, tokens=128, ways=f"{DOUBLE} | {OFF}")
    computing = [alone.with_compute(eighths / 8) for eighths in range(2, 25)]
    cases["overlap, 2 x 4"] = max(
        computing, key=lambda case: predicted(case, OFF, 0.0) / predicted(case, DOUBLE, 0.0)
    )
    for intra, (within, between), (kv_heads, tokens), of_hop in itertools.product(
        (2, 4), LINKS, SHAPES, (0, 0.5)
    ):
        cell = ClusterCase(
            intra=intra, intra_rate=within, inter_rate=between, kv_heads=kv_heads, tokens=tokens
        )
        rates = f"{within / 1e6:g} and {between / 1e6:g} MB/s"
        name = f"2 x {intra}, {rates}, heads 8:{kv_heads}, compute {of_hop:g}"
        cases[name] = cell.with_compute(of_hop)
    return cases


RINGS_APART = {"double ring, 2 x 2": 2.2, "double ring, 2 x 4": 4.5}
"""Flat over double ring, at least."""


def _bars(name: str, case: ClusterCase | None, device: str) -> Sequence[Bar]:
    if name in RINGS_APART:
        return [Bar("flat over double ring", DOUBLE, f"{FLAT} / this", RINGS_APART[name], at_most=False)]
    if name == "overlap, 2 x 4":
        return [Bar("without overlap over with", DOUBLE, f"{OFF} / this", 1.5, at_most=False)]
    if name == ALL:
        return [Bar("right choices of auto", AUTO, "right choices / cells", 0.9, at_most=False)]
    return ()


SUBJECT = Subject(
    name="topology",
    about="Wall time of attention, forward and backward, on an emulated cluster: gloo over shaped links "
    "between network namespaces, a timed wait in the place of the kernel.",
    case=ClusterCase,
    cases=_cases,
    stage=_stage,
    kind="",
    methods=_methods,
    emulated=True,
    clearly=CLEARLY,
    derive=_derive,
    summary=_summary,
    bars=_bars,
)
