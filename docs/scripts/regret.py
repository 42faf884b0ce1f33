"""Writes the tables of docs/evidence/regret.md: the rule of a call beside the best route by simulation.

`PYTHONPATH=. python docs/scripts/regret.py` takes an hour or more, and resumes from runs/regret.pkl.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from earnings import CLUSTERS, KV_HEADS, MASKS, NAMES, TOKENS, packed
from tables import with_rows

from burst_bench.methods.attention import share_of
from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.choose import AS_FAST, Question, Settings, decide, routes
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import SEARCHED, Route
from burst_plan.machines import MACHINES
from burst_plan.simulate.costing import Costs

PAGE = Path(__file__).parents[1] / "evidence" / "regret.md"
KEPT = Path("runs/regret.pkl")
LISTED = 0.195
"""The rule is behind by more in the cells that the page lists: by 20 % or more, rounded."""
SUMMARY = (
    "| cells | `head_parallel` | number | within 5 % | within 20 % | at most |\n|---|---|---|---|---|---|\n"
)
MISSES = (
    "| cluster | mask | heads | tokens | `head_parallel` | the rule's choice | the fastest | behind |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
SIDES = Pass.QUERY, Pass.KV
Seconds = Mapping[tuple[Route, Pass], float]
"""Simulated, by route and pass."""


class Cell(NamedTuple):
    """A call on a cluster."""

    cluster: str
    machine: str
    mask: str
    heads: int
    kv_heads: int
    tokens: int

    @property
    def seen(self) -> Mask:
        n = self.tokens
        named = {"causal": Mask.causal(), "full": Mask.full(), "window": Mask.window(8191, 0)}
        if self.mask in named:
            return named[self.mask]
        if self.mask == "documents":
            return packed(n, seed=0)
        kind, size = self.mask.split(":")
        return Mask.window(int(size) - 1, 0) if kind == "window" else Mask.causal() & _documents(n, size)

    @property
    def question(self) -> Question:
        ranks = CLUSTERS[self.cluster]
        shard = share_of(self.tokens // ranks.size, self.heads, self.kv_heads, 128, torch.bfloat16)
        rates = MACHINES[self.machine].rates
        return Question(shard, Layout("zigzag"), self.seen, self.tokens, ranks, rates).typical


def _documents(n: int, kind: str) -> Mask:
    """Return documents of about 1K or 8K tokens, or of lengths with a long tail."""
    draw, ends = random.Random(0), [0]
    between = {"1K": (512, 1536), "8K": (4096, 12288)}
    while ends[-1] < n:
        tail = int(min(max(128, draw.lognormvariate(7.0, 1.5)), n // 2))
        ends.append(min(n, ends[-1] + (draw.randint(*between[kind]) if kind in between else tail)))
    return Mask.documents(ends)


def earned() -> Iterator[Cell]:
    """Yield the cells of earnings.md."""
    cells = itertools.product(CLUSTERS, NAMES, MASKS, KV_HEADS, TOKENS)
    return (Cell(cluster, name, mask, 32, kv_heads, n) for cluster, name, mask, kv_heads, n in cells)


def masked() -> Iterator[Cell]:
    """Yield windows and documents, on H100s."""
    masks = [f"window:{n}" for n in (4096, 8192, 32768)] + [
        f"documents:{kind}" for kind in ("1K", "8K", "tail")
    ]
    cells = itertools.product(CLUSTERS, masks, ((32, 32), (32, 8), (8, 1)), TOKENS)
    return (Cell(cluster, "H100", mask, *heads, n) for cluster, mask, heads, n in cells)


def simulated(cell: Cell) -> Seconds:
    """Return the seconds of each pass of each route that a call may take."""
    question, seconds = cell.question, dict[tuple[Route, Pass], float]()
    degrees = tuple(legal_degrees(question.ranks, cell.heads, cell.kv_heads))
    every = Settings(overlap=True, rings=SEARCHED, degrees=degrees, directions=SIDES)
    for route in routes(question, every):
        costs = Costs(question, route.placement)
        costs.play(route, SIDES)
        seconds |= {
            (turned, each): costs.seconds(turned, each) for turned in costs.mirrors(route) for each in Pass
        }
    return seconds


class Regret(NamedTuple):
    """The rule's choice beside the fastest."""

    taken: tuple[Route, Pass]
    fastest: tuple[Route, Pass]
    behind: float


def regret(cell: Cell, seconds: Seconds, head_parallel: int | str) -> Regret:
    """Return by how much the rule is behind the fastest candidate of a configuration."""
    total = {
        (route, side): seconds[route, Pass.FORWARD] + seconds[route, side]
        for (route, _), side in itertools.product(seconds, SIDES)
        if head_parallel in ("auto", route.heads)
    }
    route, direction, _ = decide(BurstConfig(head_parallel=head_parallel), cell.question)
    fastest = min(total, key=total.__getitem__)
    return Regret((route, direction), fastest, total[route, direction] / total[fastest] - 1)


def page(text: str, groups: Mapping[str, Mapping[Cell, Seconds]]) -> str:
    """Return the page with the rows of these simulated cells."""
    summary, misses = list[str](), list[tuple[float, str]]()
    for (name, cells), degree in itertools.product(groups.items(), (1, "auto")):
        regrets = {cell: regret(cell, seconds, degree) for cell, seconds in cells.items()}
        behind = [max(0.0, each.behind) for each in regrets.values()]
        bars = AS_FAST - 1 + 1e-9, 0.2
        shares = (f"{sum(x <= most for x in behind) / len(behind):.1%}" for most in bars)
        summary.append(f"| {name} | {degree} | {len(cells)} | {' | '.join(shares)} | {max(behind):.0%} |")
        for cell, each in regrets.items():
            if each.behind > LISTED:
                taken, best = (f"{route}, {side}" for route, side in (each.taken, each.fastest))
                where = f"{cell.cluster} {cell.machine} | {cell.mask} | {cell.heads}:{cell.kv_heads}"
                row = (
                    f"| {where} | {cell.tokens // 1024}K | {degree} | {taken} | {best} | {each.behind:.0%} |"
                )
                misses.append((each.behind, row))
    text = with_rows(text, SUMMARY, summary)
    return with_rows(text, MISSES, dict.fromkeys(row for _, row in sorted(misses, reverse=True)))


def kept(cells: Iterable[Cell]) -> dict[Cell, Seconds]:
    """Return the simulated seconds of cells; seconds that an earlier run has written are read."""
    done: dict[Cell, Seconds] = pickle.loads(KEPT.read_bytes()) if KEPT.exists() else {}
    wanted = [*cells]
    for cell in wanted:
        if cell not in done:
            done[cell] = simulated(cell)
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_bytes(pickle.dumps(done))
    return {cell: done[cell] for cell in wanted}


if __name__ == "__main__":
    torch.set_num_threads(1)  # many small operations: threads would wait for each other
    groups = {"those of earnings.md": kept(earned()), "windows and documents": kept(masked())}
    PAGE.write_text(page(PAGE.read_text(), groups))
