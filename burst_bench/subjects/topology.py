"""The paper's claims about topology and overlap, measured in wall time on an emulated cluster.

Messages are real: they go through burst_attention, gloo and shaped links. The kernel is modelled: a timed
wait replaces it, as long as its FLOPs take at a given rate, since two cores cannot compute for eight ranks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from burst_bench.calibrate import exchange, least
from burst_bench.core import Bar, Case, Derived, Method, Stage, Table, Trial, World, in_words, one_of
from burst_bench.methods.attention import attended, share_of
from burst_mcore import BurstConfig, Layout, Mask, Topology
from burst_mcore.attention.choose import Candidate, Question, best
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores
from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.attention.resolve import call_of
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.rates import Rates
from burst_plan.simulate import search
from burst_plan.simulate.cost import allowed_pairs, pass_flops

WITHIN = 1.05
"""The limit of a right choice of the cost model: its time over the fastest measured."""

FREE = 1e18
"""FLOP/s at which compute takes no time."""
LINKS = ((20e6, 1e6), (10e6, 2e6), (2e6, 2e6))
"""Bytes a second, (within the node, between nodes), of the grid: slow against the cores, which copy
and merge for all ranks."""
SHAPES = ((8, 512), (2, 1024))
"""(K/V heads, tokens of a rank) of the grid. Links must take longer than the host, which needs about 0.2 s
for a call of 8 ranks on 2 cores."""
FLAT, DOUBLE = "ring=flat; backward=kv", "ring=double; backward=kv"
OFF = f"{DOUBLE}; overlap=False"
NODES_APART = "ring=double; head_placement=outer; backward=kv; head_parallel="
"""Heads across nodes, a ring within each: the number of nodes is appended."""
BOTH_RINGS, OVERLAP = f"{FLAT} | {DOUBLE}", f"{DOUBLE} | {OFF}"
GAIN = f"{DOUBLE} / this"
AUTO = "ring=auto; head_parallel=auto; backward=auto"
"""All settings left to the cost model."""
FLAT_OVER_DOUBLE = {2: 2.2, 4: 4.5}
"""Least seconds of the flat ring over the double ring's, by the ranks of a node."""


class ClusterCase(Case):
    """Wall time of attention, forward and backward, on an emulated cluster: gloo over shaped links.

    Links are between network namespaces. A timed wait takes the place of the kernel.
    """

    subject = "topology"
    emulated = True
    clearly = 1.5  # more rounds would change nothing
    overall = (Bar("right choices of auto", AUTO, "right choices / cells", 0.9, at_most=False),)

    nodes: int = 2
    intra: int = 2
    """Ranks of a node."""
    intra_rate: float = LINKS[0][0]
    """Bytes a second that a rank sends within its node."""
    inter_rate: float = LINKS[0][1]
    """The same to other nodes."""
    compute: float = FREE
    """FLOP/s of the modelled kernel."""
    heads: int = 8
    kv_heads: int = 8
    tokens: int = 256
    """Tokens of a rank."""
    head_dim: int = 32
    mask: str = one_of("causal", ("causal", "full"))
    compared: str = ""
    """The measured settings of BurstConfig, separated by |; "": every candidate, and the choice of "auto"."""

    @property
    def seen(self) -> Mask:
        return Mask.full() if self.mask == "full" else Mask.causal()

    @property
    def where(self) -> Ranks:
        return Ranks(self.nodes * self.intra, self.intra)

    @property
    def rates(self) -> Rates:
        """Rates of links and kernel, without latency."""
        return Rates(intra=self.intra_rate, inter=self.inter_rate, compute=self.compute, latency=0.0)

    @property
    def share(self) -> Shard:
        return share_of(self.tokens, self.heads, self.kv_heads, self.head_dim)

    def with_compute(self, of_step: float) -> ClusterCase:
        """Return the case with a kernel whose forward of a round takes `of_step` messages of K and V."""
        size = self.where.size
        pairs = allowed_pairs(self.seen, self.tokens * size) // size // self.nodes
        step = self.share.kv_bytes / self.inter_rate
        compute = pass_flops(self.share, pairs, Pass.FORWARD) / (of_step * step) if of_step else FREE
        return replace(self, compute=compute)

    @classmethod
    def named(cls, device: str) -> Mapping[str, ClusterCase]:
        """Return the rings without compute, overlap where it is largest, and a grid of cells for "auto".

        The rings are compared without a mask, so that all rows rotate whole rounds: under a causal one the
        flat ring drops more of them. Data and gradients have as many bytes: "kv" rotates.
        """
        cases = {
            f"double ring, 2 x {intra}": cls(intra=intra, tokens=128, mask="full", compared=BOTH_RINGS)
            for intra in FLAT_OVER_DOUBLE
        }
        compared = f"{DOUBLE} | {NODES_APART}4"
        for intra, kv_heads in itertools.product((4, 8), (8, 2)):
            name = f"heads across nodes, 4 x {intra}, heads 8:{kv_heads}"
            cases[name] = cls(nodes=4, intra=intra, kv_heads=kv_heads, tokens=1024, compared=compared)
        base = cls(intra=4, tokens=128, compared=OVERLAP)
        computing = [base.with_compute(eighths / 8) for eighths in range(2, 25)]
        cases["overlap, 2 x 4"] = max(
            computing, key=lambda case: predicted(case, OFF, 0.0) / predicted(case, DOUBLE, 0.0)
        )
        for intra, (near_rate, far_rate), (kv_heads, tokens), of_step in itertools.product(
            (2, 4), LINKS, SHAPES, (0, 0.5)
        ):
            cell = cls(
                intra=intra, intra_rate=near_rate, inter_rate=far_rate, kv_heads=kv_heads, tokens=tokens
            )
            rates = f"{near_rate / 1e6:g} and {far_rate / 1e6:g} MB/s"
            name = f"2 x {intra}, {rates}, heads 8:{kv_heads}, compute {of_step:g}"
            cases[name] = cell.with_compute(of_step)
        return cases

    @property
    def fewer_bytes(self) -> str | None:
        """The candidate with fewer bytes between nodes than the double ring, if both are the case."""
        return self.compared.removeprefix(f"{DOUBLE} | ") if "outer" in self.compared else None

    def methods(self) -> Sequence[Method]:
        """Return the candidates, without flat rings and direct exchanges that share heads: these are slow."""
        if self.compared:
            return [Method(settings.strip()) for settings in self.compared.split("|")]
        every = costed(self, "ring=auto; head_parallel=auto", 0.0)
        candidates = [each for each in every if each.ring == "double" or each.route.heads == 1]
        return [Method(name) for name in (AUTO, *map(settings_of, candidates))]

    def prepare(self, world: World) -> Stage:
        neighbours = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        latency = least(partial(exchange, [neighbours], torch.zeros(16)), world, repeats=20)
        KERNELS["timed"] = timed_kernel(self.compute)
        choose.cache_clear()  # cached kernels and calls name the previous case's kernel
        call_of.cache_clear()
        rates = replace(self.rates, latency=latency)
        topology = Topology.from_group(world.group, intra_size=self.intra, rates=rates)
        small = replace(self, tokens=max(16, self.tokens // 8))

        def trial(method: Method) -> Trial:
            config = config_of(method.name)
            step, first = (case.step(config, topology) for case in (self, small))
            # The cost model's choices are made in the first call: it counts if a candidate is far behind.
            return Trial({"": step}, warm=step if config.ring == "auto" else first)

        return Stage(trial, facts={("message", "latency"): latency})

    def step(self, config: BurstConfig, topology: Topology) -> Callable[[], None]:
        generator = torch.Generator().manual_seed(topology.rank)
        q, k, v = (
            torch.randn(1, self.tokens, heads, self.head_dim, generator=generator).requires_grad_()
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        dout = torch.ones_like(q)

        def run() -> None:
            q.grad = k.grad = v.grad = None
            attended(q, k, v, topology=topology, mask=self.seen, config=config).backward(dout)

        return run

    def derive(self, table: Table) -> Derived:
        """Yield the cost model's prediction for each candidate, and ratios of candidates."""
        latency = table["message", "latency"][0]
        medians = table.medians("wall")
        forecasts = {settings: predicted(self, settings, latency) for settings in medians}
        for settings, seconds in medians.items():
            yield settings, "predicted", [forecasts[settings]]
            yield settings, "wall / predicted", [seconds / forecasts[settings]]
        for slow in (FLAT, OFF):
            if {slow, DOUBLE} <= medians.keys():
                yield DOUBLE, f"{slow} / this", [medians[slow] / medians[DOUBLE]]
        rival = self.fewer_bytes
        if rival is not None and {rival, DOUBLE} <= medians.keys():
            gain, forecast = (seconds[DOUBLE] / seconds[rival] for seconds in (medians, forecasts))
            yield rival, GAIN, [gain]
            yield rival, f"{GAIN}, of predicted", [gain / forecast]
        fastest = table.fastest(medians.keys() - {AUTO})
        if AUTO in medians and fastest is not None:
            yield AUTO, "wall / fastest", [medians[AUTO] / medians[fastest]]

    @classmethod
    def summary(cls, tables: Mapping[str, Table]) -> Derived:
        """Yield the share of the cells in which the choice of "auto" is as fast as the fastest candidate."""
        cells = [
            table[AUTO, "wall / fastest"][0] for table in tables.values() if (AUTO, "wall / fastest") in table
        ]
        if cells:
            yield AUTO, "right choices / cells", [sum(ratio <= WITHIN for ratio in cells) / len(cells)]

    def bars(self, device: str) -> Sequence[Bar]:
        if self.compared == BOTH_RINGS and self.intra in FLAT_OVER_DOUBLE:
            ratio = FLAT_OVER_DOUBLE[self.intra]
            return [Bar("flat over double ring", DOUBLE, f"{FLAT} / this", ratio, at_most=False)]
        rival = self.fewer_bytes
        if rival is not None:
            bars = [Bar("gain, of predicted", rival, f"{GAIN}, of predicted", 0.8, at_most=False)]
            if NODES_APART in rival and self.intra == 8 and self.heads == self.kv_heads:
                bars.append(Bar("double ring over heads across nodes", rival, GAIN, 1.5, at_most=False))
            return bars
        if self.compared == OVERLAP:
            # The model predicts 1.5 at best: a gradient that takes a step less leaves less to hide.
            return [Bar("without overlap over with", DOUBLE, f"{OFF} / this", 1.4, at_most=False)]
        return ()


def config_of(settings: str) -> BurstConfig:
    """Return the configuration of a candidate, such as "ring=double; backward=kv"."""
    return in_words(BurstConfig, settings, kernel="timed")


def settings_of(candidate: Candidate) -> str:
    """Return the settings of a candidate."""
    route = candidate.route
    placement = f"head_placement={'outer' if route.outer else 'inner'}; " * (route.heads > 1)
    return f"ring={candidate.ring}; head_parallel={route.heads}; {placement}backward={candidate.direction}"


@lru_cache(maxsize=4096)
def costed(case: ClusterCase, settings: str, latency: float) -> tuple[Candidate, ...]:
    """Return the candidates that settings leave open; `latency`: seconds of a message without its bytes."""
    config, rates = config_of(settings), replace(case.rates, latency=latency)
    n, layout = case.tokens * case.where.size, Layout.of(config.layout)
    return search.costed(config, Question(case.share, layout, case.seen, n, case.where, rates))


def predicted(case: ClusterCase, settings: str, latency: float) -> float:
    """Return the seconds of a candidate by today's cost model."""
    return best(costed(case, settings, latency)).seconds


def timed_kernel(rate: float) -> Kernel:
    """Return a kernel that takes the time of its FLOPs at `rate` FLOP/s, and computes nothing."""

    def wait(q: Tensor, k: Tensor, pattern: Pattern, pass_: Pass) -> None:
        _, rows, heads, head_dim = q.shape
        pairs = rows * (rows + 1) // 2 if pattern.causal else rows * k.shape[1]
        time.sleep(pass_flops(share_of(rows, heads, k.shape[2], head_dim), pairs, pass_) / rate)

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
        wait(q, k, pattern, Pass.FORWARD)
        return torch.zeros_like(q), q.new_zeros(len(q), q.shape[2], q.shape[1])

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        wait(inputs.q, inputs.k, pattern, Pass.KV)
        return torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)

    return Kernel("timed", lambda problem: None, forward, backward, takes_delta=True)
