"""Writes the tables of the docs that follow from the code: settings, flags, keys of DeepSpeed's section.

`make tables`, after a setting, a layout or a kernel was added. tests/test_docs.py fails until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from burst_mcore.config import SETTINGS
from burst_mcore.deepspeed.config.section import reference
from burst_mcore.megatron.arguments import flag_of

DOCS = Path(__file__).parent


def pages() -> dict[str, str]:
    """Return the pages with tables, by name, as they follow from the code."""
    attention, megatron = ((DOCS / name).read_text() for name in ("attention.md", "megatron.md"))
    return {
        "attention.md": _with_rows(
            attention, "| field | legal | default | meaning |\n|---|---|---|---|\n", _settings()
        ),
        "megatron.md": _with_rows(
            megatron, "Megatron's own, or BurstAttention |\n", _flags(), "| `--burst-rates` |"
        ),
        "deepspeed-section.md": reference(),
    }


def _with_rows(page: str, before: str, rows: Iterable[str], after: str = "\n") -> str:
    """The page with these rows between `before` and the next line that begins with `after`."""
    head, tail = page.split(before)
    rest = tail.splitlines(keepends=True)
    end = next(i for i, line in enumerate(rest) if line.startswith(after))
    return "".join([head, before, *(f"{row}\n" for row in rows), *rest[end:]])


def _settings() -> Iterable[str]:
    for name, (default, _, meaning) in SETTINGS.items():
        yield f"| `{name}` | {_legal(name)} | `{default}` | {meaning} |"


def _flags() -> Iterable[str]:
    for name, (default, _, meaning) in SETTINGS.items():
        shown = "" if isinstance(default, bool) else _legal(name)
        told = f"Turns off: {meaning[0].lower()}{meaning[1:]}" if default is True else meaning
        yield f"| `{flag_of(name)}` | {shown} | {told} |"


def _legal(name: str) -> str:
    legal = SETTINGS[name].legal
    return ", ".join(f"`{word}`" for word in legal) if isinstance(legal, tuple) else legal


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
