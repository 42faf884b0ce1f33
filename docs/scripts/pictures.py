"""Draws the pictures of the docs from what runs: programs, layouts, masks, plans, measurements.

`make tables`, after one of these changed. tests/house/test_docs.py fails until then.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from drawing import GREY, INK, LIGHT, Drawing, colour
from forecasts import COMMANDS, comparison, timeline

from burst_mcore import Layout, Mask, positions
from burst_mcore.attention.geometry.cuts import cut_for
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.schedule.actions import (
    COMES_LATE,
    OWN_SHARE,
    TOTAL,
    Accumulate,
    Compute,
    Link,
    Program,
    Recv,
    Return,
    Send,
    Wait,
)
from burst_mcore.attention.schedule.route import Route, Schedule, schedule
from burst_mcore.layout.balance import imbalance
from burst_mcore.recurrent.programs import Compose
from burst_mcore.recurrent.scan import scan_of
from burst_plan.simulate.cost import allowed_pairs

IMAGES = Path(__file__).parents[1] / "images"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LANE, ROW, BOX = 138, 84, (122, 40)
"""Of a picture of steps, in pixels: from rank to rank, from step to step, and a box."""


def pictures() -> dict[str, str]:
    """Return the pictures, by the names of their files."""
    return {f"{name}.svg": str(draw()) for name, draw in DRAWN.items()}


class Message(NamedTuple):
    """An arrow: from a rank's row to the row in which another rank has it."""

    rank: int
    row: int
    peer: int
    arrives: int
    block: int
    late: bool
    far: bool


def _steps(schedule_: Schedule, alt: str, does: Callable[[int, Compute], str]) -> Drawing:
    """Draw a schedule: ranks across, steps down; what rotates has the colour of its owner."""
    drawing, route = Drawing(alt), schedule_.route
    boxes = [dict(_boxes(rank, program, does)) for rank, program in enumerate(schedule_.programs)]
    rows = sorted({row for column in boxes for row in column})
    left, top = 64, 44 if route.nodes > 1 else 28
    where = {row: top + ROW * number for number, row in enumerate(rows)}

    def middle(rank: int) -> float:
        return left + LANE * (rank + 0.5)

    for node in range(route.nodes if route.nodes > 1 else 0):
        x = left + LANE * route.intra * node + 4
        drawing.behind(x, 6, LANE * route.intra - 8, where[rows[-1]] + BOX[1] + 4, LIGHT)
        drawing.text(x + (LANE * route.intra - 8) / 2, 20, f"node {node}", anchor="middle", fill=GREY)
    for rank in range(schedule_.size):
        drawing.text(middle(rank), top - 8, f"rank {rank}", anchor="middle", bold=True)
    for number, row in enumerate(rows):
        last = row == rows[-1] and row not in {a.step for a in schedule_.programs[0]}
        drawing.text(6, where[row] + BOX[1] / 2 + 4, "at home" if last else f"step {number}", fill=GREY)
    for message in _messages(schedule_):
        row = max(row for row in boxes[message.rank] if row <= message.row)
        start = middle(message.rank) + (14 if message.late else 0), where[row] + BOX[1]
        end = middle(message.peer) + (14 if message.late else 0), where[max(message.arrives, row + 1)]
        drawing.arrow(start, end, colour(message.block), dashed=message.late, thick=message.far)
    for rank, column in enumerate(boxes):
        for row, (block, lines) in column.items():
            drawing.box(middle(rank) - BOX[0] / 2, where[row], *BOX, colour(block), lines, rx=4)
    return drawing


def _boxes(
    rank: int, program: Program, does: Callable[[int, Compute], str]
) -> Iterator[tuple[int, tuple[int, list[str]]]]:
    """Yield (row, (the block's owner, lines)) for each step in which a rank computes or adds."""
    last = max(action.step for action in program)
    for step, group in groupby(program, key=lambda action: action.step):
        actions = list(group)
        lines, block = [], rank
        for action in actions:
            if isinstance(action, Compute):
                block = action.source
                lines.append(does(rank, action))
            elif isinstance(action, Accumulate):
                said = {OWN_SHARE: "stays", TOTAL: "sum complete"}.get(
                    action.into or action.buffer, "added to sum"
                )
                lines.append(f"dQ {action.source}: {said}")
            elif isinstance(action, Return):
                yield last + 1, (rank, [f"dQ {rank} = own share", "+ sum of the others"])
        if lines:
            yield step, (block, lines)


def _messages(schedule_: Schedule) -> Iterator[Message]:
    """Yield the messages of all programs, with the owner of what they carry."""
    holds: dict[tuple[int, str], int] = {(rank, "home"): rank for rank in range(schedule_.size)}
    steps = sorted({action.step for program in schedule_.programs for action in program})
    for step in steps:
        sent, received = {}, []
        for rank, program in enumerate(schedule_.programs):
            for at, action in enumerate(program):
                if action.step != step:
                    continue
                if isinstance(action, Accumulate):
                    holds[rank, action.into or action.buffer] = action.source
                elif isinstance(action, Send):
                    sent[rank, action.peer, action.channel] = holds[rank, action.buffer]
                elif isinstance(action, Recv):
                    received.append((rank, at, action))
        for rank, at, action in received:
            block = sent[action.peer, rank, action.channel]
            holds[rank, action.buffer] = block
            arrives = _arrives(schedule_.programs[rank], at)
            late = action.channel.kind in COMES_LATE
            yield Message(action.peer, step, rank, arrives, block, late, action.channel.link == Link.INTER)


def _arrives(program: Program, at: int) -> int:
    """Return the row whose box needs what the `at`-th action receives: after the wait for it."""
    channel = program[at].channel  # type: ignore[union-attr]
    wait = next(
        i for i in range(at, len(program)) if isinstance(program[i], Wait) and program[i].channel == channel
    )
    rest = (a.step for a in program[wait:] if isinstance(a, (Compute, Accumulate)))
    return next(rest, program[-1].step + 1)


def ring() -> Drawing:
    """Forward of a ring."""
    return _steps(
        schedule(Route(1, 4), "forward"),
        "Forward of a ring of 4 ranks: keys and values rotate, queries stay",
        lambda rank, compute: f"Q {rank} with K, V {compute.source}",
    )


def query() -> Drawing:
    """Backward in which queries rotate."""
    return _steps(
        schedule(Route(1, 4), "query"),
        "Backward of a ring of 4 ranks: queries rotate, their gradient follows one step behind",
        lambda rank, compute: f"K, V {rank} with Q {compute.source}",
    )


def double() -> Drawing:
    """Forward of a ring of rings."""
    return _steps(
        schedule(Route(2, 3), "forward"),
        "Forward of a double ring of 2 nodes of 3 ranks: thick arrows cross between nodes",
        lambda rank, compute: f"Q {rank} with K, V {compute.source}",
    )


def work() -> Drawing:
    """Who computes which pair of shards: on a ring, and with shared heads."""
    drawing = Drawing("Which rank computes which pair of queries and keys: ring, shared heads")
    cell, size = 44, 4
    routes = {
        "ring: own queries": Route(1, 4),
        "2 ranks share heads": Route(1, 2, heads=2),
    }
    for number, (name, route) in enumerate(routes.items()):
        left, top = 40 + number * (cell * size + 56), 56
        drawing.text(left, 16, name, bold=True)
        drawing.text(left, 34, "keys of rank", fill=GREY)
        for pair, ranks in sorted(_computed(route).items()):
            for stripe, rank in enumerate(ranks):
                width = cell / len(ranks)
                x, y = left + cell * pair[1] + width * stripe, top + cell * pair[0]
                drawing.box(x, y, width, cell, colour(rank), [str(rank)], stroke="white")
        for rank in range(size):
            drawing.text(left + cell * (rank + 0.5), top - 6, str(rank), anchor="middle")
            drawing.text(left - 8, top + cell * (rank + 0.5) + 4, str(rank), anchor="end")
    drawing.text(
        40,
        56 + cell * size + 18,
        "Down: queries of a rank. Colour and number: the rank that computes.",
        fill=GREY,
    )
    return drawing


def _computed(route: Route) -> dict[tuple[int, int], list[int]]:
    """Return the ranks that compute the pair of two ranks' queries and keys, each for its heads."""
    placement, found = route.placement, defaultdict(set)
    for rank, program in enumerate(schedule(route, "forward").programs):
        for action in program:
            if isinstance(action, Compute):
                own = placement.ring_rank(rank)
                parts = range(placement.heads) if action.part is None else [action.part]
                for member in parts:
                    for other in range(placement.heads):
                        pair = placement.rank(own, member), placement.rank(action.source, other)
                        found[pair].add(rank)
    return {pair: sorted(ranks) for pair, ranks in found.items()}


def layouts() -> Drawing:
    """Which rank holds which of 32 tokens, and how even causal work is."""
    drawing = Drawing("32 tokens on 4 ranks under five layouts, and the busiest rank's share of causal work")
    tokens, size, cell, left = 32, 4, 18, 150
    drawing.text(left, 16, "tokens of the sequence, coloured by the rank that holds them", fill=GREY)
    drawing.text(left + cell * tokens + 14, 16, "busiest rank, causal", fill=GREY)
    for row, name in enumerate(("contiguous", "zigzag", "stacked-zigzag:2", "striped", "block-striped:8")):
        layout, y = Layout.of(name), 28 + 34 * row
        drawing.text(left - 10, y + 16, name, anchor="end")
        for rank in range(size):
            for token in positions(tokens, rank=rank, size=size, layout=layout).tolist():
                drawing.box(left + cell * token, y, cell, 24, colour(rank), [str(rank)], stroke="white")
        busiest = imbalance(layout, Mask.causal(), 8192, size)
        drawing.text(left + cell * tokens + 14, y + 16, f"{busiest:.2f} x the mean")
    return drawing


def _masks() -> dict[str, Mask]:
    return {
        "causal": Mask.causal(),
        "window": Mask.window(6, 0),
        "documents": Mask.causal() & Mask.documents([0, 9, 14, 24]),
        "chunked": Mask.causal() & Mask.chunked(8),
        "prefix": Mask.prefix(8),
        "images": Mask.causal() | Mask.images([(3, 8), (14, 20)]),
        "tree": Mask.tree([-1, 0, 0, 1], [8, 6, 6, 4]),
        "dilated": Mask.causal() & Mask.dilated(16, 3),
    }


def masks() -> Drawing:
    """Eight masks of 24 tokens."""
    drawing, tokens, cell = Drawing("Eight masks of 24 tokens: queries down, keys across"), 24, 6
    for number, (name, mask) in enumerate(_masks().items()):
        x, y = 8 + number % 4 * (cell * tokens + 24), 24 + number // 4 * (cell * tokens + 40)
        drawing.text(x, y - 8, name, bold=True)
        drawing.box(x, y, cell * tokens, cell * tokens, "white", stroke="#bbbbbb")
        for row, allowed in enumerate(_pairs(mask, tokens).tolist()):
            for first, count in _runs(allowed):
                drawing.box(x + cell * first, y + cell * row, cell * count, cell, colour(0))
    return drawing


def _pairs(mask: Mask, n: int) -> torch.Tensor:
    """Return which of n keys each of n queries may attend to."""
    at = torch.arange(n)
    return mask.allows(at, at)


def _runs(marks: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of true marks."""
    for marked, group in groupby(enumerate(marks), key=lambda one: one[1]):
        places = [place for place, _ in group]
        if marked:
            yield places[0], len(places)


def rows() -> Drawing:
    """Which share of a rank's keys each other rank reads, under three masks."""
    drawing = Drawing(
        "Which rows rotate: the share of a rank's keys that another rank reads, under three masks"
    )
    size, cell, tokens = 6, 34, 6144
    masks_ = {
        "causal, contiguous": (Mask.causal(), "contiguous"),
        "causal, zigzag": (Mask.causal(), "zigzag"),
        "window of 512, contiguous": (Mask.window(511, 0), "contiguous"),
    }
    for number, (name, (mask, layout)) in enumerate(masks_.items()):
        plan = plan_of(Layout.of(layout), mask, tokens, Placement(size))
        left, top, total = 30 + number * (cell * size + 50), 56, 0.0
        drawing.text(left, 16, name, bold=True)
        for reader in range(size):
            for owner in range(size):
                read = 0 if owner == reader else sum(map(len, plan.needed(owner, reader, of_queries=False)))
                share = read / (tokens / size)
                total += share
                shown = "#dddddd" if owner == reader else _tint(share)
                words = [f"{share:.1f}"] if share else []
                drawing.box(
                    left + cell * owner, top + cell * reader, cell, cell, shown, words, stroke="white"
                )
            drawing.text(left - 6, top + cell * (reader + 0.5) + 4, str(reader), anchor="end", fill=GREY)
            drawing.text(left + cell * (reader + 0.5), top - 6, str(reader), anchor="middle", fill=GREY)
        drawing.text(left, 34, f"{total / (size * (size - 1)):.0%} of an all-gather")
    drawing.text(
        30,
        56 + cell * size + 18,
        "Across: the rank that owns the keys. Down: the rank that reads them.",
        fill=GREY,
    )
    return drawing


def _tint(share: float) -> str:
    """Return white to blue."""
    low, high = (255, 255, 255), (78, 121, 167)
    return "#" + "".join(f"{round(a + (b - a) * share * 0.75):02x}" for a, b in zip(low, high, strict=True))


def segments() -> Drawing:
    """What three policies recompute of causal attention, and what they keep."""
    drawing, tokens, cell = (
        Drawing("What segment recompute computes again: a quarter, for half of the memory"),
        24,
        7,
    )
    pairs = _pairs(Mask.causal(), tokens)
    for number, keep in enumerate((0.0, 0.5, 1.0)):
        cut = cut_for(keep, Layout.of("striped"), Mask.causal(), 8192, 8).keep
        x, y, first = 8 + number * (cell * tokens + 60), 24, round((1 - cut) * tokens)
        again = allowed_pairs(Mask.causal(), round(8192 * (1 - cut))) / allowed_pairs(Mask.causal(), 8192)
        drawing.text(x, y - 8, ("Full()", "Segment(keep=0.5)", "KeepAttention()")[number], bold=True)
        for row in range(tokens):
            fill = colour(1) if row < first else colour(0)
            for start, count in _runs(pairs[row].tolist()):
                drawing.box(x + cell * start, y + cell * row, cell * count, cell, fill)
        drawing.box(x + cell * tokens + 8, y, 10, cell * tokens, "white", stroke="#bbbbbb")
        if cut:
            drawing.box(x + cell * tokens + 8, y + cell * first, 10, cell * (tokens - first), colour(0))
        drawing.text(x, y + cell * tokens + 18, f"computed again: {again:.0%}")
        drawing.text(x, y + cell * tokens + 34, f"O and LSE kept: {cut:.0%}")
    drawing.text(
        8,
        24 + cell * tokens + 54,
        "Orange: computed again in backward. Blue: kept. Bar: O and LSE in memory.",
        fill=GREY,
    )
    return drawing


def loss() -> Drawing:
    """Peak memory of an LM head with its loss, of the committed run."""
    drawing, case = (
        Drawing("Peak memory of LM heads with their loss, measured on a CPU"),
        "8192x1024x128256, bfloat16",
    )
    names = {
        "burst": "burst",
        "compiled-naive": "torch.compile",
        "torch": "torch 2.13's own",
        "deepspeed": "DeepSpeed",
    }
    figures = json.loads((RESULTS / "loss.json").read_text())["figures"]
    peaks = {
        f["method"]: median(f["samples"]) / 1e9 for f in figures if (f["case"], f["meter"]) == (case, "peak")
    }
    for row, (method, peak) in enumerate(sorted(peaks.items(), key=lambda one: one[1])):
        y = 30 + 30 * row
        drawing.text(120, y + 15, names[method], anchor="end")
        drawing.box(128, y, 120 * peak, 22, colour(0 if method == "burst" else 6))
        drawing.text(136 + 120 * peak, y + 15, f"{peak:.2f} GB")
    logits = 8192 * 128256 * 2 / 1e9
    drawing.text(128, 16, f"8192 tokens, vocabulary of 128,256: all logits are {logits:.2f} GB", fill=GREY)
    return drawing


def states() -> Drawing:
    """The scan of states over 4 ranks on 2 nodes."""
    drawing = Drawing("A scan over 4 ranks on 2 nodes: each rank gets the state before its fragment")
    programs, left, top = scan_of([[0, 1, 2, 3]], 4, 2).programs, 64, 44
    boxes = {
        (rank, row): lines for rank, program in enumerate(programs) for row, lines in _maps(rank, program)
    }

    def place(rank: int, row: int) -> tuple[float, float]:
        return left + LANE * rank + (LANE - BOX[0]) / 2, top + ROW * row

    for (rank, row), lines in boxes.items():
        drawing.box(*place(rank, row), *BOX, colour(rank), lines, rx=4)
    for rank, program in enumerate(programs):
        drawing.text(place(rank, 0)[0] + BOX[0] / 2, top - 8, f"rank {rank}", anchor="middle", bold=True)
        for action in program:
            if isinstance(action, Send):
                (x, y), (to_x, to_y) = (
                    place(rank, max(row for of, row in boxes if of == rank and row <= action.step)),
                    place(action.peer, action.step + 1),
                )
                far = rank // 2 != action.peer // 2
                drawing.arrow((x + BOX[0] / 2, y + BOX[1]), (to_x + BOX[0] / 2, to_y), INK, thick=far)
    for node in range(2):
        drawing.behind(left + LANE * 2 * node + 4, 6, LANE * 2 - 8, drawing.height, LIGHT)
        drawing.text(left + LANE * (2 * node + 1), 20, f"node {node}", anchor="middle", fill=GREY)
    return drawing


def _maps(rank: int, program: tuple[object, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield (row, lines) for each step of a scan after which a rank has something new."""
    yield 0, [f"runs fragment {rank}"]
    for step, group in groupby(program, key=lambda action: action.step):
        lines = []
        for action in group:
            if isinstance(action, Recv):
                lines.append(f"gets {_span(action.buffer)}")
            elif isinstance(action, Compose):
                lines.append(f"composes {action.earlier.first} to {action.later.stop - 1}")
        if lines:
            yield step + 1, lines


def _span(buffer: str) -> str:
    first, stop = map(int, buffer[buffer.index("[") + 1 : -1].split(":"))
    if first == 0:
        return f"state after {stop - 1}"
    return f"map of {first}" if stop == first + 1 else f"map of {first} to {stop - 1}"


DRAWN: dict[str, Callable[[], Drawing]] = {
    draw.__name__: draw
    for draw in (comparison, ring, query, double, work, layouts, masks, rows, segments, loss, states)
} | {name: partial(timeline, name) for name in COMMANDS}

if __name__ == "__main__":
    for file, text in pictures().items():
        (IMAGES / file).write_text(text)
