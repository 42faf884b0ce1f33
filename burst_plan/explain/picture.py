"""A timeline as a picture: a band for each rank, a line for each lane, time to the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from burst_plan.simulate.trace import Event

COLOURS = {
    "compute": "#4c72b0",
    "intra data": "#dd8452",
    "inter data": "#c44e52",
    "intra gradient": "#8172b3",
    "inter gradient": "#937860",
    "intra total": "#ccb974",
    "inter total": "#64b5cd",
    "direct data": "#da8bc3",
    "direct gradient": "#8c8c8c",
}
"""By lane; other messages are those of a head group."""
GROUP = "#55a868"


def picture(path: Path) -> Path:
    """Return the file that a picture is written to: its suffix says the format, PNG if there is none.

    Raises:
        ValueError: a folder, or a suffix of no format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file")
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    legal = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in legal:
        raise ValueError(
            f"{path} has no suffix of a picture; legal: {', '.join(f'.{name}' for name in legal)}"
        )
    return path


def save_timelines(runs: Mapping[str, Sequence[Event]], title: str, path: Path) -> None:
    """Write a PNG with a panel for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes = {run: _lanes(events) for run, events in runs.items()}
    lines = sum(map(len, lanes.values()))
    figure, panels = pyplot.subplots(
        len(runs), figsize=(14, 1.5 + 0.22 * lines), squeeze=False, layout="constrained"
    )
    for panel, (run, events) in zip(panels[:, 0], runs.items(), strict=True):
        rows = {lane: number for number, lane in enumerate(lanes[run])}
        end = max(event.ended for event in events)
        scale, unit = (1e3, "ms") if end >= 1e-3 else (1e6, "us")
        for event in events:
            start, length = event.started * scale, (event.ended - event.started) * scale
            row = rows[event.rank, event.lane]
            panel.barh(
                row, length, left=start, height=0.8, color=COLOURS.get(event.lane, GROUP),
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            if length * len(event.label) ** -1 > end * scale / 160:
                panel.text(start + length / 2, row, event.label, ha="center", va="center", fontsize=6)
        panel.set_yticks(range(len(rows)), [f"rank {rank}  {lane}" for rank, lane in rows], fontsize=7)
        for row, (rank, _) in enumerate(rows):
            if row and list(rows)[row - 1][0] != rank:
                panel.axhline(row - 0.5, color="0.8", linewidth=0.8)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.set_xlim(0, end * scale)
        panel.set_xlabel(unit)
        panel.set_title(f"{run}: {end * scale:.4g} {unit}", loc="left", fontsize=9)
    figure.suptitle(title, fontsize=10)
    found = {event.lane for events in runs.values() for event in events}
    legend = [Patch(color=colour, label=lane) for lane, colour in COLOURS.items() if lane in found]
    if any(lane not in COLOURS for lane in found):
        legend.append(Patch(color=GROUP, label="head group"))
    figure.legend(handles=legend, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lanes(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Return (rank, lane), in the order of the picture."""
    order = list(COLOURS)
    return sorted(
        {(event.rank, event.lane) for event in events},
        key=lambda x: (x[0], order.index(x[1]) if x[1] in order else len(order), x[1]),
    )
