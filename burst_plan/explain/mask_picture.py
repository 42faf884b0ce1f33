"""A mask as a picture: over the sequence, as the tiles that each rank computes, and as work per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import Plan
from burst_mcore.attention.geometry.reading import pairs_between
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import Kernel
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.mask.bands import UNBOUNDED
from burst_plan.explain.pairs import pairs_at

CELLS = 512
"""Cells a side, at most, of the mask's picture."""
SHOWN = 8
"""Ranks, at most, whose tiles are drawn; evenly spaced."""
LISTED = 16
"""Ranks, at most, that are named on an axis."""
OUTLINED = 100
"""Tiles of a kind and a rank, at most, that are told apart by lines."""
KINDS = {
    "full": "#37474f",
    "causal": "#8fa8b8",
    "window": "#c9b458",
    "packed": "#6f8f6a",
    "masked": "#a1536b",
}
"""Kinds of tiles, and their colours, which are none of the ranks'."""
EMPTY = (0.95, 0.95, 0.95)

Point = tuple[float, float]


def save_mask(plan: Plan, pass_: Pass, kernel: Kernel, title: str, path: Path) -> None:
    """Write the picture of a plan in a pass, in tiles for `kernel`, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(19, 8), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1.0, 1.25, 0.6))
    colours = _colours(plan.size)
    _draw_mask(left.subplots(), plan, colours)
    _draw_tiles(middle, plan, pass_, kernel)
    _draw_work(right.subplots(), plan, colours)
    figure.suptitle(fill(title, 160), fontsize=13)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def raster(mask: Mask, n: int, cells: int = CELLS) -> Tensor:
    """Return the allowed share of each cell's pairs, float64 [cells, cells], queries down, keys across.

    Cells are as large, but for the last ones; there are n cells a side if n is less.

    Raises:
        ValueError: the mask does not go with n tokens.
    """
    sizes = edges_of(n, cells).diff()
    return pairs_between(Layout("contiguous"), mask, n, len(sizes)) / (sizes[:, None] * sizes).double()


def edges_of(n: int, cells: int = CELLS) -> Tensor:
    """Return the edges of the picture's cells, int64 [cells + 1]."""
    size = -(-n // min(cells, n))
    return (torch.arange(-(-n // size) + 1) * size).clamp(max=n)


def owners(plan: Plan, edges: Tensor) -> Tensor:
    """Return the share of each cell's tokens that each position holds, float64 [cells, positions]."""
    shares = []
    for position in range(plan.size):
        runs = [run for member in range(plan.heads) for run in plan.runs(position, member)]
        start, step, length = torch.tensor([(run.start, run.step, len(run)) for run in runs]).unbind(1)
        before = (-((start - edges[:, None]) // step)).clamp(min=0).minimum(length).sum(1)
        shares.append(before.diff() / edges.diff())
    return torch.stack(shares, 1).double()


def kind_of(tile: Tile) -> str:
    """Return one of KINDS."""
    if tile.pattern.masked:
        return "packed" if tile.pattern.packed else "masked"
    if tile.pattern.full:
        return "full"
    return "causal" if tile.pattern.causal else "window"


def tiles_summary(plan: Plan, pass_: Pass, kernel: Kernel) -> str:
    """Say how many tiles all positions compute in a pass, and how many of their pairs are allowed."""
    kinds: Counter[str] = Counter()
    allowed = computed = 0
    for position, source in product(range(plan.size), repeat=2):
        for tile in _met(plan, pass_, kernel, position, source):
            kinds[kind_of(tile)] += 1
            allowed += tile.pattern.pairs
            computed += prod(tile.pattern.shape) if kind_of(tile) == "masked" else tile.pattern.pairs
    each = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    return (
        f"tiles:  {kinds.total()} for kernel {kernel.name} ({each}), {computed:,} pairs, of which the mask "
        f"allows {allowed / max(1, computed):.1%}"
    )


def _met(plan: Plan, pass_: Pass, kernel: Kernel, position: int, source: int) -> tuple[Tile, ...]:
    """Return the tiles of the bundle of `source` at `position`."""
    q_at, k_at = (source, position) if pass_ == Pass.QUERY else (position, source)
    return tiles_of(plan, q_at, k_at, kernel.abilities)


def outlines(tile: Tile) -> list[list[Point]]:
    """Return the computed area of a tile, as polygons of (key row, query row)."""
    if tile.pattern.masked:
        found = []
        for part in tile.pattern.pieces:
            m0, n0 = _row_at(tile.q, part.m0), _row_at(tile.k, part.n0)
            q, k = range(m0, m0 + part.m1 - part.m0), range(n0, n0 + part.n1 - part.n0)
            found.append(_outline(q, k, part.low, part.high))
        return found
    low = -UNBOUNDED if tile.pattern.low is None else tile.pattern.low
    high = UNBOUNDED if tile.pattern.high is None else tile.pattern.high
    return [_outline(q, k, low, high) for q in tile.q for k in tile.k]


def _row_at(rows: Sequence[range], place: int) -> int:
    """Return the row that stands at `place` among `rows`."""
    for each in rows:
        if place < len(each):
            return each[place]
        place -= len(each)
    raise IndexError(place)


def _outline(q: range, k: range, low: int, high: int) -> list[Point]:
    """Return the outline of a rectangle between two diagonals, n - m from low to high; rows may have gaps."""
    rows, columns = len(q), len(k)
    corners: list[Point] = [(0, 0), (columns, 0), (columns, rows), (0, rows)]
    corners = _clipped(corners, 1, high + 1)
    corners = _clipped(corners, -1, 1 - low)
    return [(_along(k, n), _along(q, m)) for n, m in corners]


def _along(rows: range, at: float) -> float:
    """Return the place of the edge `at` between its neighbours in `rows`."""
    if rows.step > 0:
        return min(rows.start + at * rows.step, rows[-1] + 1)
    return max(rows.start + 1 + at * rows.step, rows[-1])


def _clipped(polygon: list[Point], sign: int, most: int) -> list[Point]:
    """Return the part of a polygon in which sign * (x - y) <= most."""
    found: list[Point] = []
    for (x, y), (u, v) in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
        here, there = sign * (x - y) - most, sign * (u - v) - most
        if here <= 0:
            found.append((x, y))
        if here * there < 0:
            way = here / (here - there)
            found.append((x + way * (u - x), y + way * (v - y)))
    return found


def _colours(size: int) -> Tensor:
    """Return a colour for each position, float64 [size, 3]."""
    from matplotlib import colormaps

    if size <= 10:
        table = [colormaps["tab10"](at) for at in range(size)]
    else:
        table = [colormaps["turbo"](0.05 + 0.9 * at / (size - 1)) for at in range(size)]
    return torch.tensor(table, dtype=torch.float64)[:, :3]


def _draw_mask(panel: Any, plan: Plan, colours: Tensor) -> None:
    edges = edges_of(plan.n)
    held, allowed = owners(plan, edges), raster(plan.mask, plan.n)[:, :, None]
    strength = torch.where(allowed > 0, 0.25 + 0.75 * allowed, 0.0)
    picture = torch.tensor(EMPTY, dtype=torch.float64) * (1 - strength) + (held @ colours)[:, None] * strength
    panel.imshow(picture.clamp(0, 1).numpy(), extent=(0, plan.n, plan.n, 0), interpolation="nearest")
    marks = [plan.n * at // 4 for at in range(5)]
    panel.set_xticks(marks, [_short(x) for x in marks])
    panel.set_yticks(marks, [_short(x) for x in marks])
    panel.set_xlabel("key")
    mixed = bool((held.amax(1) < 0.99).any())
    panel.set_ylabel("query" + " (rows finer than the picture: the colours of their ranks mix)" * mixed)
    panel.set_title(f"the mask, by the {_unit(plan)} that holds the query", fontsize=11)


def _short(x: int) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if x >= size and x * 4 % size == 0:
            return f"{x / size:g}{unit}"
    return str(x)


def _unit(plan: Plan) -> str:
    return "rank" if plan.heads == 1 else f"group of {plan.heads} ranks"


def _name(plan: Plan, position: int) -> str:
    first, last = (plan.placement.rank(position, member) for member in (0, plan.heads - 1))
    if plan.heads == 1:
        return f"rank {first}"
    return f"ranks {first}, {plan.size} apart" if plan.placement.outer else f"ranks {first}-{last}"


def _draw_tiles(figure: Any, plan: Plan, pass_: Pass, kernel: Kernel) -> None:
    """Draw a strip for each position: the rows that stay there down, the rows of all positions across."""
    from matplotlib.patches import Patch

    shown = _shown(plan.size)
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    kinds: set[str] = set()
    for panel, position in zip(panels, shown, strict=True):
        kinds |= _draw_strip(panel, plan, pass_, kernel, position)
        panel.set_ylabel(_name(plan, position), rotation=0, ha="right", va="center", fontsize=10)
    own, others = ("key", "query") if pass_ == Pass.QUERY else ("query", "key")
    some = "" if len(shown) == plan.size else f", {len(shown)} of {plan.size} {_unit(plan)}s"
    figure.suptitle(
        f"tiles for kernel {kernel.name}{some}: own {own} rows down, {others} rows of all across", fontsize=11
    )
    named = range(0, plan.size, -(-plan.size // LISTED))
    firsts = [str(plan.placement.rank(p, 0)) for p in named]
    panels[-1].set_xticks([(p + 0.5) * plan.rows for p in named], firsts)
    panels[-1].tick_params(axis="x", length=0)
    panels[-1].set_xlabel(f"{others} rows of rank" + " (the first of each group)" * (plan.heads > 1))
    legend = [Patch(color=colour, label=kind) for kind, colour in KINDS.items() if kind in kinds]
    if legend:
        figure.legend(handles=legend, loc="outside lower center", ncols=len(KINDS), fontsize=10)


def _draw_strip(panel: Any, plan: Plan, pass_: Pass, kernel: Kernel, position: int) -> set[str]:
    """Draw what a position computes; the kinds of its tiles."""
    from matplotlib.collections import PolyCollection

    polygons: dict[str, list[list[Point]]] = {kind: [] for kind in KINDS}
    for kind, polygon in placed(plan, pass_, kernel, position):
        polygons[kind].append(polygon)
    for kind, found in polygons.items():
        edge = "white" if len(found) <= OUTLINED else "face"  # so that many small ones are seen
        panel.add_collection(PolyCollection(found, facecolors=KINDS[kind], edgecolors=edge, linewidths=0.3))
    panel.set_facecolor(EMPTY)
    panel.set_xlim(0, plan.rows * plan.size)
    panel.set_ylim(plan.rows, 0)
    panel.set_yticks([])
    if plan.size <= 4 * LISTED:
        for source in range(1, plan.size):
            panel.axvline(source * plan.rows, color="0.6", linewidth=0.6)
    return {kind for kind, found in polygons.items() if found}


def placed(plan: Plan, pass_: Pass, kernel: Kernel, position: int) -> Iterator[tuple[str, list[Point]]]:
    """Yield (kind, polygon) of all that a position computes, in the coordinates of its strip."""
    for source in range(plan.size):
        for tile in _met(plan, pass_, kernel, position, source):
            for polygon in outlines(tile):
                points = [(m, n) for n, m in polygon] if pass_ == Pass.QUERY else polygon
                yield kind_of(tile), [(x + source * plan.rows, y) for x, y in points]


def _shown(size: int) -> list[int]:
    """Return the positions whose tiles are drawn, the first and the last among them."""
    if size <= SHOWN:
        return list(range(size))
    return [round(at * (size - 1) / (SHOWN - 1)) for at in range(SHOWN)]


def _draw_work(panel: Any, plan: Plan, colours: Tensor) -> None:
    sides = [pairs_at(plan, pass_) for pass_ in (Pass.FORWARD, Pass.QUERY)]
    mean = max(1.0, float(sides[0].mean()))
    for side, words, height, alpha in ((0, "keys travel", -0.2, 1.0), (1, "queries travel", 0.2, 0.45)):
        bars = [position + height for position in range(plan.size)]
        panel.barh(
            bars, (sides[side] / mean).tolist(), 0.38, color=colours.tolist(), alpha=alpha, label=words
        )
    panel.axvline(1.0, color="black", linewidth=1, linestyle="--")
    named = range(0, plan.size, -(-plan.size // LISTED))
    panel.set_yticks(named, [_name(plan, position) for position in named])
    panel.set_ylim(plan.size - 0.4, -0.6)
    panel.set_xlim(0, 1.08 * max(float(side.max()) / mean for side in sides))
    panel.set_xlabel(f"of the mean, {mean:.3g} pairs", fontsize=10)
    keys, queries = (float(side.max()) / mean for side in sides)
    panel.set_title(
        f"work: at most {max(keys, queries):.3f} x the mean\n"
        f"upper bars: where keys travel, {keys:.3f}\nlower bars: where queries travel, {queries:.3f}",
        fontsize=10,
        loc="left",
    )
