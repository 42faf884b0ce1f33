"""Writes the table of docs/evidence/megatron-tests.md: what is tested with Megatron, and by which test.

`make docs` puts the table into the page, from the tests that are marked `proves`; this script prints it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "<!-- tests that are marked proves -->\n"
HEAD = "| what | with | 0.16.1 | test |\n|---|---|---|---|\n"


def with_tests(page: str) -> str:
    """Return the page with the table behind its mark."""
    before, after = page.split(MARK)
    return f"{before}{MARK}\n{table()}{after}"


def table() -> str:
    """Return the table of all tests that are marked `proves`."""
    return HEAD + "".join(f"{row}\n" for row in rows())


def rows() -> Iterator[str]:
    """Yield a row for each mark `proves`, by the thing that the tests prove."""
    folders = ROOT / "tests" / "megatron", ROOT / "tests" / "plan"  # the second has the tests of patches
    paths = sorted((path for f in folders for path in f.rglob("test_*.py")), key=lambda path: path.name)
    proofs = [proof for path in paths for proof in _proofs(path)]
    for what in dict.fromkeys(proof[0] for proof in proofs):
        for _, how, test, on_all in (proof for proof in proofs if proof[0] == what):
            yield f"| {what} | {how} | {'yes' if on_all else '-'} | {test} |"


def _proofs(path: Path) -> Iterator[tuple[str, str, str, bool]]:
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
                test = f"`{path.relative_to(ROOT / 'tests')}`: {function.name}"
                yield what, how, test, on_all


if __name__ == "__main__":
    sys.stdout.write(table())
