"""Draws the timelines of the docs, from the traces that `burst-mcore draw` writes."""

from __future__ import annotations

import json
import shlex
from contextlib import chdir
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from drawing import GREY, Drawing, colour
from typer.testing import CliRunner

from burst_plan.cli import app

COMMANDS = {
    "double_ring": "draw --cluster 2x4 --mask full --seq 64K",
}
"""What burst-mcore is asked for each picture; the caption of the picture names the command."""
LANES = ("compute", "intra data", "intra gradient", "inter data", "inter gradient", "intra total")
"""The lanes that have a colour, in the order of colours."""
LEFT, WIDTH, BAR, LINE, GAP = 64, 720, 16, 9, 10
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
            top, height = (y + BAR + LINE * (line - 1) + 2, LINE - 2) if line else (y, BAR)
            labels = [event.label] * (line == 0)
            fill = colour(LANES.index(event.lane))
            x, width = round(LEFT + event.start * scale, 1), max(1, round(event.length * scale, 1))
            drawing.box(x, top, width, height, fill, labels, stroke="white", stroke_width=0.5)
        y += BAR + LINE * (len(lanes) - 1) + GAP
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
