"""What planning costs before the first message: CPU seconds and memory of one rank, from 8 to 4096 ranks.

Every figure is of a process of its own, in which nothing was planned before.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from tabulate import tabulate

from burst_mcore.attention.autotune.choose import RINGS, Ranks, best, contenders, typical
from burst_mcore.attention.geometry.plan import plan
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.aten import CPU
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.attention.shard import Shard
from burst_mcore.bench import provenance
from burst_mcore.bench.verdict import Verdict
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.rates import DEFAULT

TOKENS = 4096
"""Of a rank."""
NODE = 8
"""Ranks of a node."""
DOCUMENT = 2048
"""Tokens of a document, on average; none is shorter than half of that, or longer than one and a half."""
SIZES = (8, 64, 256, 1024, 4096)

BARS = {
    ("causal", 64): 0.05, ("full", 64): 0.05, ("window", 64): 0.05,
    ("causal", 1024): 1.0, ("full", 1024): 1.0, ("window", 1024): 1.0,
    ("auto", 1024): 2.0, ("auto, window", 1024): 2.0, ("auto, documents", 1024): 2.0, ("for_mask", 1024): 2.0,
    ("new documents", 8): 0.02, ("new documents", 64): 0.06, ("new documents", 256): 0.5,
}  # fmt: skip
"""Seconds, at most, by what is planned and ranks."""
MEGABYTES = 300
"""Memory that a plan of 1024 ranks may take beyond that of `import torch`."""


@dataclass(frozen=True)
class Row:
    """What one rank takes to plan."""

    planned: str
    ranks: int
    seconds: float
    """Of its CPU."""
    megabytes: float
    """The most memory that it took meanwhile, beyond what it had."""


def packed(n: int, seed: int) -> Mask:
    """Causal documents of about `DOCUMENT` tokens."""
    draw, ends = random.Random(seed), [0]
    while ends[-1] < n:
        ends.append(min(n, ends[-1] + draw.randint(DOCUMENT // 2, 3 * DOCUMENT // 2)))
    return Mask.causal() & Mask.documents(ends)


def _program(mask: Mask, layout: Layout, size: int) -> None:
    """Rank 3's forward, and backward with K and V travelling, on the double ring."""
    what, route = plan(layout, mask, TOKENS * size, size), Route(size // NODE, NODE)
    for name in ("forward", "kv"):
        program(3, route, name, what)


def _new_documents(size: int) -> None:
    """All that a step meets when it brings other documents: mask, plan, programs and tiles."""
    n, route = TOKENS * size, Route(size // NODE, NODE)
    mask, layout = packed(n, seed=1), Layout("zigzag")
    what = plan(layout, mask, n, size)
    for name in ("forward", "kv"):
        program(3, route, name, what)
    for source in range(size):
        tiles_of(what, 3, source, CPU.abilities)


def _auto(size: int, mask: Mask) -> None:
    """What "auto" does in the first call, head_parallel=1: 32 heads, 8 K/V heads, bfloat16."""
    layout, mask = typical(Layout("zigzag"), mask, TOKENS * size, size)
    shard = Shard(
        batch=1, tokens=TOKENS, heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16
    )
    played, _ = contenders(
        shard, layout, mask, TOKENS * size, Ranks(size, NODE), DEFAULT["cuda"],
        overlap=True, rings=RINGS, degrees=(1,), directions=("query", "kv"),
    )  # fmt: skip
    best(played)


PLANNED: dict[str, Callable[[int], object]] = {
    "causal": lambda size: _program(Mask.causal(), Layout("zigzag"), size),
    "full": lambda size: _program(Mask.full(), Layout("zigzag"), size),
    "window": lambda size: _program(Mask.window(TOKENS - 1, 0), Layout("zigzag"), size),
    "causal, striped": lambda size: _program(Mask.causal(), Layout("striped"), size),
    "new documents": _new_documents,
    "auto": lambda size: _auto(size, Mask.causal()),
    "auto, window": lambda size: _auto(size, Mask.window(TOKENS - 1, 0)),
    "auto, documents": lambda size: _auto(size, packed(TOKENS * size, seed=0)),
    "for_mask": lambda size: Layout.for_mask(packed(TOKENS * size, seed=0), TOKENS * size, size),
}
"""By what is planned."""


def measure(name: str, size: int, repeats: int) -> Row:
    """The median of `repeats` processes, one after another."""
    rows = sorted((_in_a_process(name, size) for _ in range(repeats)), key=lambda row: row.seconds)
    return rows[len(rows) // 2]


def _in_a_process(name: str, size: int) -> Row:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(name, size, theirs))
    process.start()
    wait([ours, process.sentinel])
    process.join()
    if not ours.poll():
        raise RuntimeError(f"planning {name} for {size} ranks ended with exit code {process.exitcode}")
    seconds, megabytes = ours.recv()
    return Row(name, size, seconds, megabytes)


def _run(name: str, size: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    Layout.for_mask(packed(64, seed=2), 64, 2)  # what torch does at its first operations is not planning
    before, start = _resident(), time.process_time()
    PLANNED[name](size)
    took = time.process_time() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    answer.send((took, max(0.0, most - before)))


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The figures that have bars."""
    found = []
    for row in rows:
        name = f"{row.planned}, {row.ranks} ranks"
        if (row.planned, row.ranks) in BARS:
            found.append(Verdict(f"{name}, seconds", row.seconds, BARS[row.planned, row.ranks], at_most=True))
        if row.planned in ("causal", "full", "window") and row.ranks == 1024:
            found.append(Verdict(f"{name}, MB", row.megabytes, MEGABYTES, at_most=True))
    return found


def report(rows: Sequence[Row]) -> str:
    """Seconds and MB, a line for what is planned and a column for each number of ranks."""
    sizes = sorted({row.ranks for row in rows})
    by = {(row.planned, row.ranks): f"{row.seconds:.3g} s, {row.megabytes:.0f} MB" for row in rows}
    lines = [[name, *(by.get((name, size), "") for size in sizes)] for name in PLANNED]
    text: str = tabulate(lines, headers=["planned", *(f"{size} ranks" for size in sizes)])
    return text


def as_json(rows: Sequence[Row], judged: Sequence[Verdict]) -> str:
    """All figures, and what they are of."""
    return provenance.as_json(
        f"CPU seconds and memory of one rank that plans, cold; {TOKENS} tokens a rank, {NODE} a node",
        rows=[asdict(row) for row in rows],
        verdicts=[asdict(verdict) | {"reached": verdict.reached} for verdict in judged],
    )
