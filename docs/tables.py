"""Writes the tables of the docs that follow from the code: settings, flags, keys, tests of Megatron.

`make tables`, after a setting, a layout or a kernel was added. tests/test_docs.py fails until then.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

from predictions import page

from burst_mcore.config import SETTINGS
from burst_mcore.deepspeed.config.section import reference
from burst_mcore.megatron.arguments import flag_of

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests" / "megatron"


def pages() -> dict[str, str]:
    """Return the pages with tables, by name, as they follow from the code."""
    attention, megatron = ((DOCS / name).read_text() for name in ("attention.md", "megatron.md"))
    megatron = _with_rows(megatron, "| what | with | 0.16.1 | 0.19.2 |\n|---|---|---|---|\n", _tested())
    megatron = _with_rows(
        megatron,
        "| version | by the launcher | by the patches | largest difference |\n|---|---|---|---|\n",
        _trained(),
    )
    return {
        "attention.md": _with_rows(
            attention, "| field | legal | default | meaning |\n|---|---|---|---|\n", _settings()
        ),
        "megatron.md": _with_rows(
            megatron, "Megatron's own, or BurstAttention |\n", _flags(), "| `--burst-rates` |"
        ),
        "deepspeed-section.md": reference(),
        "predictions.md": page(DOCS.parent / "benchmarks" / "public"),
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


def _tested() -> Iterable[str]:
    """Yield a row for each test of Megatron that is marked `proves`, by the thing that the tests prove."""
    proofs = [proof for path in sorted(TESTS.glob("test_*.py")) for proof in _proofs(path)]
    for what in dict.fromkeys(proof[0] for proof in proofs):
        for _, how, test, on_all in (proof for proof in proofs if proof[0] == what):
            yield f"| {what} | {how} | {test if on_all else '-'} | {test} |"


def _proofs(path: Path) -> Iterable[tuple[str, str, str, bool]]:
    """Yield (what, with what, test, whether the test runs on 0.16.1, too) for each marked test of a file."""
    text = path.read_text()
    needs_trainer = 'importorskip("megatron.training"' in text
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        words = [ast.unparse(decorator) for decorator in function.decorator_list]
        on_all = not needs_trainer and not any(
            "needs_" in w or "VERSION <" in w for w in words if "param" not in w
        )
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.proves":
                what, how = (ast.literal_eval(argument) for argument in decorator.args)
                link = f"../tests/megatron/{path.name}"
                yield what, how, f"[{path.stem.removeprefix('test_')}: {function.name}]({link})", on_all


def _trained() -> Iterable[str]:
    """Yield a row for each version of Megatron that tests/megatron/versions.py trained."""
    rows = json.loads((DOCS.parent / "benchmarks" / "megatron-versions.json").read_text())["rows"]
    for tree in dict.fromkeys(row["tree"] for row in rows):
        of_tree = [row for row in rows if row["tree"] == tree]
        worst = max(row["worst relative difference"] for row in of_tree)
        launched = sum(row["way"] == "launcher" for row in of_tree)
        version = f"{tree} ({of_tree[0]['version']})"
        yield f"| {version} | runs: {launched} | runs: {len(of_tree) - launched} | {worst:.1e} |"


def _legal(name: str) -> str:
    legal = SETTINGS[name].legal
    return ", ".join(f"`{word}`" for word in legal) if isinstance(legal, tuple) else legal


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
