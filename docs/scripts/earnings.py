"""Writes docs/evidence/earnings.md: what each word of "auto" gains over the plain ring, by the cost model.

`PYTHONPATH=. python docs/scripts/earnings.py` takes some minutes; after a change of the model or of presets.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tables import with_rows

from burst_bench.methods.attention import share_of
from burst_mcore.attention.choose import AS_FAST, Family, Question, Settings, routes
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import RINGS
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_plan.machines import MACHINES
from burst_plan.simulate.costing import Costs

PAGE = Path(__file__).parents[1] / "evidence" / "earnings.md"
DOCUMENT = 2048
"""Tokens of a document, on average; none is shorter than half of that, or longer than one and a half."""
CLUSTERS = {"1x8": Ranks(8, 8), "2x8": Ranks(16, 8), "4x8": Ranks(32, 8), "8x8": Ranks(64, 8)}
NAMES = ("H100", "A800", "L20-PCIe")
MASKS = ("causal", "full", "window", "documents")
KV_HEADS = (32, 8)
TOKENS = (2**15, 2**18, 2**20)
QUERY, RING = "backward query", "backward auto"
DECIDED = {
    RING: "searched",
    "mirror": "searched",
    "flat ring": "by name",
    "heads within a node": "searched",
    "direct exchange": "searched",
    "heads across nodes": "searched",
}
"""Rows, in the order of ties, each with what follows from it."""
SUMMARY = (
    "| word | over the plain ring | added to all rows above | of these nine in ten at most | in a call |\n"
    "|---|---|---|---|---|\n"
)
BY_CLUSTER = f"| cluster | {' | '.join(DECIDED)} |\n|---|{'---|' * len(DECIDED)}\n"
Cell = dict[str, float]
"""Seconds of the fastest route, by row."""


def packed(n: int, seed: int) -> Mask:
    """Return causal documents of about `DOCUMENT` tokens."""
    draw, ends = random.Random(seed), [0]
    while ends[-1] < n:
        ends.append(min(n, ends[-1] + draw.randint(DOCUMENT // 2, 3 * DOCUMENT // 2)))
    return Mask.causal() & Mask.documents(ends)


def cell(cluster: str, machine: str, mask: str, kv_heads: int, n: int) -> Cell:
    """Return the fastest of the routes that need each word; rings and "query" are the first rows."""
    ranks, of_words = CLUSTERS[cluster], {"window": Mask.window(8191, 0), "full": Mask.full()}
    seen = packed(n, seed=0) if mask == "documents" else of_words.get(mask, Mask.causal())
    shard = share_of(n // ranks.size, 32, kv_heads, 128, torch.bfloat16)
    question = Question(shard, Layout("zigzag"), seen, n, ranks, MACHINES[machine].rates).typical
    degrees = tuple(legal_degrees(ranks, 32, kv_heads))
    every = Settings(overlap=True, rings=RINGS[1:], degrees=degrees, directions=(Pass.QUERY, Pass.KV))
    seconds: Cell = {}
    for route, ring in routes(question, every).items():
        family, costs = Family.of(route, question.ranks.intra), Costs(question, route.placement)
        for side, turned in itertools.product(costs.play(route, every.directions), costs.mirrors(route)):
            row, took = _row(family, turned, ring), costs.candidate(ring, turned, side).seconds
            for each in (row, QUERY) if row == RING and side == Pass.QUERY else (row,):
                seconds[each] = min(took, seconds.get(each, took))
    return seconds


def _row(family: Family, route: Route, ring: str) -> str:
    if family == Family.RING:
        return "flat ring" if ring == "flat" else "mirror" if route.mirrored else RING
    return [*DECIDED][family + 2]


def gains(cells: Sequence[Cell], row: str) -> tuple[list[float], list[float]]:
    """Return by which factors a row's routes are faster, sorted: than the plain ring, than all rows above."""
    above = [*DECIDED][: [*DECIDED].index(row)]
    over_ring, added = [], []
    for seconds in cells:
        plain = seconds[RING if above else QUERY]
        before = min((seconds[each] for each in above if each in seconds), default=plain)
        took = seconds.get(row, before)
        over_ring.append(max(1.0, plain / took))
        added.append(max(1.0, before / took))
    return sorted(over_ring), sorted(added)


def often(factors: Sequence[float]) -> str:
    """Return the share of cells in which a gain is no tie."""
    return f"{sum(factor > AS_FAST for factor in factors) / len(factors):.0%}"


def summary(cells: Sequence[Cell]) -> Iterable[str]:
    """Yield a row for each word."""
    for row, decided in DECIDED.items():
        over_ring, added = gains(cells, row)
        words = [f"{often(each)}, at most {each[-1] - 1:.0%}" for each in (over_ring, added)]
        yield f"| {row} | {words[0]} | {words[1]} | {added[int(0.9 * len(added))] - 1:.0%} | {decided} |"


def by_cluster(cluster: str, machine: str) -> tuple[list[Cell], str]:
    """Return the cells of a cluster, and its row."""
    cells = [cell(cluster, machine, *each) for each in itertools.product(MASKS, KV_HEADS, TOKENS)]
    added = (gains(cells, row)[1] for row in DECIDED)
    words = (f"{often(each)}, {each[-1] - 1:.0%}" for each in added)
    return cells, f"| {cluster} {machine} | {' | '.join(words)} |"


def page() -> str:
    """Return the page with the rows of today's model."""
    found = [by_cluster(*each) for each in itertools.product(CLUSTERS, NAMES)]
    text = with_rows(PAGE.read_text(), SUMMARY, summary([each for cells, _ in found for each in cells]))
    return with_rows(text, BY_CLUSTER, (row for _, row in found if row.startswith(("| 1x8", "| 8x8"))))


if __name__ == "__main__":
    torch.set_num_threads(1)  # many small operations: threads would wait for each other
    PAGE.write_text(page())
