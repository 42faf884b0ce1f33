"""Tables no wider than the terminal. COLUMNS counts first; files and pipes get the whole table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

NARROWEST = 12
"""Least width in characters of a column whose cells are broken into lines."""


def terminal() -> int:
    """Return the columns of the terminal; a very large number where there is none."""
    return shutil.get_terminal_size((2**20, 24)).columns


def table(
    rows: Sequence[Mapping[str, Any]], less: Sequence[str] = (), align: Mapping[str, str] | None = None,
    **options: Any,
) -> str:  # fmt: skip
    """Return rows as text, with a note on columns that do not fit.

    Args:
        less: columns to leave out where the terminal is narrow, in this order.
        align: "left" or "right", by column.
        options: of tabulate.
    """
    from tabulate import tabulate  # of the extra "cli": predictions do without it

    width, names = terminal(), list(rows[0])
    out = [name for name in less if name in names]

    def drawn(shown: Sequence[str], widths: Sequence[int | None] | None = None) -> str:
        cells = [{name: row[name] for name in shown} for row in rows]
        sides = {} if align is None else {"colalign": [align[name] for name in shown]}
        text: str = tabulate(cells, headers="keys", maxcolwidths=widths, **sides, **options)
        return text

    for count in range(len(out) + 1):
        shown = [name for name in names if name not in out[:count]]
        text = drawn(shown)
        if (excess := _width(text) - width) <= 0:
            break
    else:
        longest = max(shown, key=lambda name: max(len(str(row[name])) for row in rows))
        room = max(NARROWEST, max(len(str(row[longest])) for row in rows) - excess)
        text = drawn(shown, [room if name == longest else None for name in shown])
    note = f"\n({width} columns wide; without {', '.join(name for name in names if name not in shown)})"
    return text + (note if len(shown) < len(names) else "")


def cut(text: str) -> str:
    """Return text whose lines end at the edge of the terminal, with a note on the missing columns."""
    width = terminal()
    if _width(text) <= width:
        return text
    lines = [line if len(line) <= width else line[: width - 3] + "..." for line in text.splitlines()]
    return "\n".join([*lines, f"(cut at {width} columns; a pipe or a file gets all)"])


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))
