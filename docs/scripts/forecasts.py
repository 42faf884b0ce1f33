"""Draws what the cost model predicts: README's plot of methods, and the timelines of the docs.

The plot has the time of attention and the peak memory of a step, by methods of CP, on H100s. Timelines are
drawn from the traces that `burst-mcore draw` writes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from drawing import GREY, Drawing, colour
from typer.testing import CliRunner

from burst_bench.published.methods import FITTED, MethodPlan, plan_of, seconds_of
from burst_bench.published.rows import Row
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.step.memory import stack, total
from burst_plan.step.model import PRESETS
from burst_plan.step.plan import Plan

RATES = MACHINES["H100"].rates_by(FITTED)
ROW = Row(
    hardware="H100", gpus=8, gpus_per_node=8, heads=64, kv_heads=8, head_dim=128, batch=1, seq=2**17,
    mask="causal", passes="fwd+bwd", method="burst", tflops=1.0,
)  # fmt: skip
LENGTHS = {2**17: "128K", 2**19: "512K", 2**20: "1M"}
METHODS = ("Megatron p2p", "Megatron a2a+p2p (USP)", "Ulysses", "burst", "burst, the best head_parallel")
PLACES = tuple((gpus, seq) for gpus in (8, 64) for seq in LENGTHS)
MODEL = PRESETS["llama3-8b"]
UNIT, GB, BAR = 70, 0.6, 20
"""Pixels of the kernel's own time, of a GB, and of a bar's width."""


def slowdowns(gpus: int, seq: int) -> list[float]:
    """Return the seconds of forward and backward, as multiples of a kernel's that nothing interrupts."""
    row = replace(ROW, gpus=gpus, seq=seq)
    named = [replace(row, method=name) for name in ("ring", "usp", "ulysses", "burst")]
    plans = [plan_of(replace(each, head_parallel=8 if each.method == "usp" else None)) for each in named]
    assert all(isinstance(plan, MethodPlan) for plan in plans), plans
    seconds = [seconds_of(row, plan, RATES) for plan in plans if isinstance(plan, MethodPlan)]
    kernel = seconds_of(replace(row, gpus=1), MethodPlan(), RATES) / gpus
    return [each / kernel for each in [*seconds, min(_by_heads(row))]]


def _by_heads(row: Row) -> list[float]:
    """Return the seconds of burst with each legal number of ranks of a node that share heads."""
    degrees = [d for d in legal_degrees(row.ranks, row.heads, row.kv_heads) if d <= row.ranks.intra]
    plans = [
        MethodPlan(heads=heads, double=True, direction=direction, exchanges=4 * (heads > 1))
        for heads in degrees
        for direction in (Pass.KV, Pass.QUERY)
    ]
    return [seconds_of(row, plan, RATES) for plan in plans]


def peaks(gpus: int, seq: int) -> list[float | None]:
    """Return the GB of each method at the worst moment of a step; None where heads do not divide.

    All recompute whole layers. Only burst has the fused loss; others make logits of a rank's tokens at once.
    """
    nodes = max(1, gpus // 8)
    whole = Plan(cp=gpus, recompute="full", fused_loss=False)
    found = {
        "p2p": stack(MODEL, whole, seq, "kv", nodes),
        "a2a+p2p": stack(MODEL, whole, seq, "kv", nodes, heads=8),
        "ulysses": stack(MODEL, whole, seq, "kv", nodes, heads=gpus) if MODEL.heads % gpus == 0 else None,
        "burst": stack(MODEL, replace(whole, fused_loss=True), seq, "query", nodes),
    }
    return [None if each is None else total(each) / 1e9 for each in found.values()]


def comparison() -> Drawing:
    """Time of attention over that of the kernel alone, and memory of a step, on 8 and 64 H100s."""
    drawing = Drawing("Predicted time of causal attention, and peak memory of a training step, on H100s")
    for number, name in enumerate(METHODS):
        x, y = 10 + 240 * (number % 3), 10 + 20 * (number // 3)
        drawing.box(x, y, 14, 12, colour(number))
        drawing.text(x + 20, y + 11, name)
    title = "time of causal attention, forward and backward, over the kernel's own; 64 heads, 8 K/V heads"
    times = {place: slowdowns(*place) for place in PLACES}
    _panel(drawing, 66, title, times, UNIT, 2.6, ".2f")
    title = (
        "GB at the worst moment of a step of Llama-3-8B, recomputed; line: 80 GB; 32 heads: no Ulysses on 64"
    )
    memory = {place: peaks(*place) for place in PLACES}
    top, highest = 310, 210
    drawing.box(10, top + 20 + (highest - 80) * GB, 6 * BAR * len(PLACES), 1, "#ddd")  # behind the numbers
    _panel(drawing, top, title, memory, GB, highest, ".0f")
    return drawing


def _panel(
    drawing: Drawing,
    top: float,
    title: str,
    values: Mapping[tuple[int, int], Sequence[float | None]],
    unit: float,
    highest: float,
    form: str,
) -> None:
    """Draw bars by place and method under a title."""
    drawing.text(10, top, title, fill=GREY)
    floor, x = top + 20 + highest * unit, 10.0
    for (gpus, seq), of_place in values.items():
        for number, value in enumerate(of_place):
            left = x + BAR * number
            if value is not None:
                drawing.box(left, floor - unit * value, BAR - 3, unit * value, colour(number))
            words, y = ("-", floor) if value is None else (f"{value:{form}}", floor - unit * value)
            drawing.text(left + (BAR - 3) / 2, y - 4, words, size=8, anchor="middle")
        drawing.text(x + 2.5 * BAR, floor + 16, f"{LENGTHS[seq]}, {gpus} GPUs", anchor="middle")
        x += 6 * BAR


COMMANDS = {
    "double_ring": "draw --cluster 2x4 --mask full --seq 64K",
}
"""What burst-mcore is asked for each picture; the caption of the picture names the command."""
LANES = ("compute", "intra data", "intra gradient", "inter data", "inter gradient", "intra total")
"""The lanes that have a colour, in the order of colours."""
LEFT, WIDTH, BAND, LINE, GAP = 64, 720, 16, 9, 10
"""Of a picture, in pixels: room for ranks, length of the time axis, height of tiles and of messages, and
the space between ranks."""


class Event(NamedTuple):
    """What a rank does in one lane; milliseconds."""

    rank: int
    lane: str
    label: str
    start: float
    length: float


def timeline(name: str) -> Drawing:
    """Draw a band for each rank: tiles in blue, each kind of message on a line of its own."""
    events = _events(COMMANDS[name])
    end = max(event.start + event.length for event in events)
    lanes = [lane for lane in LANES if any(event.lane == lane for event in events)]
    scale, y = WIDTH / end, 26.0
    drawing = Drawing(f"burst-mcore {COMMANDS[name]}")
    drawing.text(LEFT, 14, f"predicted: {end:.4g} ms", bold=True)
    for rank, band in groupby(sorted(events), key=lambda event: event.rank):
        drawing.text(LEFT - 8, y + 12, f"rank {rank}", anchor="end", bold=True)
        for event in band:
            line = lanes.index(event.lane)
            top, height = (y + BAND + LINE * (line - 1) + 2, LINE - 2) if line else (y, BAND)
            labels = [event.label] * (line == 0)
            fill = colour(LANES.index(event.lane))
            x, width = round(LEFT + event.start * scale, 1), max(1, round(event.length * scale, 1))
            drawing.box(x, top, width, height, fill, labels, stroke="white", stroke_width=0.5)
        y += BAND + LINE * (len(lanes) - 1) + GAP
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if end / step <= 9)
    for tick in range(0, int(end) + 1, step):
        drawing.behind(round(LEFT + tick * scale, 1), 26, 1, y - 26, "#dddddd")
        drawing.text(round(LEFT + tick * scale, 1), y + 10, f"{tick} ms", anchor="middle", fill=GREY)
    x = float(LEFT)
    for lane in lanes:
        drawing.box(x, y + 24, 12, 12, colour(LANES.index(lane)))
        drawing.text(x + 17, y + 34, lane)
        x += 36 + 6.4 * len(lane)
    return drawing


def _events(command: str) -> list[Event]:
    """Return the events of the trace that a command writes."""
    with TemporaryDirectory() as folder, chdir(folder):
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, done.output
        rows = json.loads(Path("trace.json").read_text())["traceEvents"]
    spans = (row for row in rows if row["ph"] == "X")
    return [Event(r["pid"], r["cat"], r["name"], r["ts"] / 1e3, r["dur"] / 1e3) for r in spans]
