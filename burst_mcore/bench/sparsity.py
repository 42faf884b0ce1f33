"""What masks save: burst_attention beside its tiles called bare, beside masked dense attention, and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.autotune.choose import Ranks, best, candidates
from burst_mcore.attention.geometry.pattern import Seen
from burst_mcore.attention.geometry.plan import Plan, plan
from burst_mcore.attention.geometry.rows import count, take
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import Kernel, RowGradients, Scores
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Send
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.attention.shard import Shard
from burst_mcore.bench import provenance
from burst_mcore.bench.run import alternating, in_processes, touch_memory
from burst_mcore.bench.verdict import Verdict, bars
from burst_mcore.config import BurstConfig
from burst_mcore.explain.problem import DTYPES, Problem
from burst_mcore.layout import Layout, shard
from burst_mcore.layout.balance import imbalance, keys_per_query
from burst_mcore.rates import DEFAULT

SHORT = 3
"""Times as many rounds of cases without masked dense attention, which takes the most time."""
ROOM = 32
"""Memory that a process takes before anything is measured, in tensors of the whole sequence."""
DENSE_ROWS = 512
"""Query rows of a call of masked dense attention: its mask is as large as this times the sequence."""


@dataclass(frozen=True)
class Case:
    """A mask that is measured, and the bars that it must reach."""

    name: str
    problem: Problem
    layout: str
    dense: float | None = None
    """Masked dense attention must take so many times as long, at least."""
    ideal: float | None = None
    """What it would take if time went with pairs."""
    per_pair: float | None = None
    """Time per allowed pair over that of the dense kernel, at most."""


@dataclass(frozen=True)
class Row:
    """What was measured of a case: CPU seconds of forward and backward over all ranks, medians of repeats."""

    mask: str
    layout: str
    tokens: int
    imbalance: float
    burst: float
    of_tiles: float
    """Time divided by that of the same kernel calls alone, in one process, measured alternately."""
    of_tiles_shared: float
    """The same with as many processes, each calling the tiles of its rank bare at the same time: what is left
    when both share the machine's caches and cores alike."""
    times_faster: float | None
    """Than masked dense attention in one process."""
    ideal: float | None
    per_pair: float
    """CPU seconds per allowed pair over those of the unmasked kernel."""
    way: str
    forward_mb: float
    """Sent in forward, all ranks together."""
    all_gather_mb: float
    """What an all-gather of K and V, or a full ring, sends."""
    least_mb: float
    """Every row once to each rank that reads it (MagiAttention's zero-redundancy bound)."""


def cases(seq: int, heads: int) -> list[Case]:
    """The paper's table (masked dense, causal balanced, window), and packed and sparse masks."""

    def problem(mask: str, n: int = seq) -> Problem:
        return Problem(seq=n, heads=heads, kv_heads=heads, head_dim=64, mask=mask)

    eighth = seq // 8
    lengths = ",".join(["8192"] * (seq // 8192 - 1))  # the last is what is left
    return [
        Case("causal", problem("causal"), "zigzag", dense=1.8, ideal=2.0),
        Case("window of 1/8", problem(f"window:{eighth}"), "zigzag", dense=6.0, ideal=8.5),
        Case("window of 1/8", problem(f"window:{eighth}"), "contiguous", dense=6.0, ideal=8.5),
        Case("documents of 8K", problem(f"causal & documents:{lengths}"), "auto", per_pair=1.15),
        Case("documents of 8K", problem(f"causal & documents:{lengths}"), "zigzag"),
        Case("64 documents", problem("causal & documents:random,64", 2 * seq), "auto"),
        Case("blocks of 512, 1/4", problem("blocks:512,0.25"), "auto"),
        Case("dilated by 4", problem(f"causal & dilated:{eighth},4"), "zigzag"),
    ]


def measure(case: Case, ranks: int, repeats: int) -> Row:
    """Measure a case on so many gloo processes of this machine.

    Raises:
        RuntimeError: a rank failed.
    """
    found: list[Row] = in_processes(ranks, _measure, case, repeats)
    return found[0]


def _measure(rank: int, size: int, case: Case, repeats: int) -> Row:
    problem = case.problem
    mask, n = problem.seen, problem.seq
    layout = Layout.for_mask(mask, n, size) if case.layout == "auto" else Layout.of(case.layout)
    group = dist.group.WORLD
    assert group is not None
    topology, config = Topology.from_group(group), BurstConfig(layout=layout)
    tensors = problem.tensors()
    touch_memory(ROOM * tensors[0].nbytes)
    local = [shard(x, 1, rank=rank, size=size, layout=layout) for x in tensors]
    kernel = choose("auto", problem.on_kernel)

    def burst() -> None:
        q, k, v = (x.detach().requires_grad_() for x in local[:3])
        out = burst_attention(q, k, v, topology=topology, mask=mask, config=config)
        assert isinstance(out, Tensor)
        out.backward(local[3])

    def alone(run: Callable[[], object]) -> Callable[[], object]:  # the others wait asleep
        return run if rank == 0 else lambda: None

    tiles = _bare_tiles(problem, layout, size, kernel)
    runs = [burst, lambda: tiles(rank), alone(lambda: [tiles(at) for at in range(size)])]
    runs.append(alone(_unmasked(problem, kernel)))
    if case.dense is not None:
        runs.append(alone(_masked_dense(problem, kernel)))
    clocks = alternating(runs, repeats if case.dense is not None else SHORT * repeats)
    of_all = torch.tensor([clock.cpu for clock in clocks[:2]], dtype=torch.float64)
    dist.all_reduce(of_all)
    ours, shared = of_all.tolist()
    return _row(case, layout, size, ours, [shared, *(clock.cpu for clock in clocks[2:])])


def _row(case: Case, layout: Layout, size: int, ours: list[float], others: list[list[float]]) -> Row:
    problem = case.problem
    mask, n, median = problem.seen, problem.seq, statistics.median

    def over(theirs: list[float]) -> float:
        return median(a / b for a, b in zip(ours, theirs, strict=True))

    pairs, dense_pairs = int(keys_per_query(mask, n).sum()), min(n, DENSE_TOKENS) ** 2
    what = plan(layout, mask, n, size)
    width = 2 * problem.heads * problem.head_dim * DTYPES[problem.dtype].itemsize / 1e6
    shape = Shard(
        batch=1,
        tokens=what.rows,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        value_dim=problem.head_dim,
        dtype=torch.float32,
    )
    way = best(
        candidates(
            shape, layout, mask, n, Ranks(size, size), DEFAULT["cpu"],
            overlap=True, rings=("double", "flat", "direct"), degrees=(1,), directions=("query", "kv"),
        )
    )  # fmt: skip
    moved, least = _rows_sent(what, way.route), what.reading(of_queries=False).elsewhere
    return Row(
        mask=case.name,
        layout=str(layout),
        tokens=n,
        imbalance=imbalance(layout, mask, n, size),
        burst=median(ours),
        of_tiles=over(others[1]),
        of_tiles_shared=over(others[0]),
        times_faster=1 / over(others[3]) if len(others) > 3 else None,
        ideal=case.ideal,
        per_pair=over(others[2]) * dense_pairs / pairs,
        way=f"{way.route}, {way.direction}",
        forward_mb=moved * width,
        all_gather_mb=(size - 1) * size * what.rows * width,
        least_mb=least * width,
    )


def _rows_sent(what: Plan, route: Route) -> int:
    """Rows that all ranks send in a forward."""
    programs = [program(rank, route, "forward", what) for rank in range(route.size)]
    sends = [action for steps in programs for action in steps if isinstance(action, Send)]
    return sum(what.rows if action.rows is None else count(action.rows) for action in sends)


def _bare_tiles(problem: Problem, layout: Layout, size: int, kernel: Kernel) -> Callable[[int], None]:
    """A rank's tiles, forward and backward, with no ring and no merging around them."""
    parts = [
        [shard(x, 1, rank=rank, size=size, layout=layout) for x in problem.tensors()] for rank in range(size)
    ]
    what, how = plan(layout, problem.seen, problem.seq, size), Scores(problem.head_dim**-0.5)

    def run(at: int) -> None:
        q, _, _, dout = parts[at]
        for source in range(size):
            _, k, v, _ = parts[source]
            for tile in tiles_of(what, at, source, kernel.abilities):
                rows = take(q, tile.q), take(k, tile.k), take(v, tile.k)
                out, lse = kernel.forward(*rows, tile.seen, how)
                x = RowGradients(take(dout, tile.q), *rows, out, lse, lse)
                kernel.backward(x, tile.seen, how)

    return run


DENSE_TOKENS = 8192
"""The unmasked kernel, whose time per pair is the unit, runs on at most so many tokens."""


def _unmasked(problem: Problem, kernel: Kernel) -> Callable[[], None]:
    q, k, v, dout = (x[:, :DENSE_TOKENS] for x in problem.tensors())
    seen, how = Seen((q.shape[1], k.shape[1])), Scores(problem.head_dim**-0.5)

    def run() -> None:
        out, lse = kernel.forward(q, k, v, seen, how)
        kernel.backward(RowGradients(dout, q, k, v, out, lse, lse), seen, how)

    return run


def _masked_dense(problem: Problem, kernel: Kernel) -> Callable[[], None]:
    """All queries x all keys with the mask put on the scores: the paper's "Attention Masking"."""
    q, k, v, dout = problem.tensors()
    how, at = Scores(problem.head_dim**-0.5), torch.arange(problem.seq)
    strips = [slice(first, first + DENSE_ROWS) for first in range(0, problem.seq, DENSE_ROWS)]
    masks = [Seen.by(problem.seen.allows(at[strip], at)) for strip in strips]

    def run() -> None:
        for strip, seen in zip(strips, masks, strict=True):
            out, lse = kernel.forward(q[:, strip], k, v, seen, how)
            delta = row_delta(dout[:, strip], out)
            kernel.backward(RowGradients(dout[:, strip], q[:, strip], k, v, out, lse, delta), seen, how)

    return run


def verdicts(found: Sequence[tuple[Case, Row]]) -> Iterator[Verdict]:
    """Every figure that has a bar."""
    for case, row in found:
        name = f"{case.name}, {row.layout.partition('(')[0]}"
        yield Verdict(f"{name}: CPU over its tiles' called bare", row.of_tiles, 1.10, at_most=True)
        if case.dense is not None and row.times_faster is not None:
            yield Verdict(f"{name}: masked dense over it", row.times_faster, case.dense, at_most=False)
        if case.per_pair is not None:
            yield Verdict(f"{name}: per pair over dense kernel", row.per_pair, case.per_pair, at_most=True)
        if case.layout == "auto":
            yield Verdict(f"{name}: busiest rank over mean", row.imbalance, 1.05, at_most=True)


HEADERS = {
    "mask": "mask",
    "layout": "layout",
    "tokens": "tokens",
    "imbalance": "busiest / mean",
    "burst": "CPU s",
    "of_tiles": "/ bare tiles",
    "of_tiles_shared": "/ bare, sharing",
    "times_faster": "dense / it",
    "ideal": "ideal",
    "per_pair": "per pair / dense",
    "way": "way",
    "forward_mb": "forward MB",
    "all_gather_mb": "all-gather, full ring MB",
    "least_mb": "zero redundancy MB",
}


def report(rows: Sequence[Row], judged: Sequence[Verdict]) -> str:
    """The figures, and beside their bars."""
    table: str = tabulate([asdict(row) for row in rows], headers=HEADERS, floatfmt=".3g")
    return f"{table}\n\n{bars(judged)}"


def as_json(rows: Sequence[Row], judged: Sequence[Verdict], ranks: int) -> str:
    """All figures, and what they are of."""
    return provenance.as_json(
        f"CPU seconds of burst_attention, forward and backward, summed over {ranks} gloo processes",
        rows=[asdict(row) for row in rows],
        verdicts=[{**asdict(v), "reached": v.reached} for v in judged],
    )
