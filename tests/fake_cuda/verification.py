"""Writes the tables of docs/evidence/verification.md, by the command that the page names.

The page says which cases ran on the devices that are not there, and which launches and how much memory a pass
takes. tests/test_fake_cuda.py fails until the page is as the code is.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # one thread a process, and Triton's interpreter
import pytest

from . import ranks
from .catalogue import CASES, LARGE, PASSES, ROUTES, backward_of_q, counted, grid_of, run

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "verification.md"
OF_CASES = "| cases | number | findings |\n|---|---|---|\n"
OF_PASSES = "| route | launches, forward | memory, forward | launches, backward | memory, backward |\n"
OF_PASSES += "|---|---|---|---|---|\n"
OF_LARGE = "| ranks | heads | rotates | memory | planned |\n|---|---|---|---|---|\n"
GROUPS = {
    "attention": "one call of attention",
    "recompute": "checkpointed layers",
    "loss": "the LM head and its loss",
    "failure": "a rank that fails, refuses or does not come",
}
"""By function of a case: what it runs."""


def page(before: str, findings: Mapping[str, Counter[str]]) -> str:
    """Return the page with these findings in its table of cases."""
    return with_rows(before, OF_CASES, _of_cases(findings))


def of_pass(name: str, numbers: tuple[int, float, int, float]) -> str:
    """Return the row of a route."""
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def of_large(setting: tuple[int, int, int, str], counted: tuple[float, float]) -> str:
    """Return the row of a ring whose parts are too large to wait."""
    (size, intra, kv_heads, backward), (peak, planned) = setting, counted
    ring = f"{size // intra} x {intra}" if intra else str(size)
    return f"| {ring} | 4:{kv_heads} | {backward} | {peak:.1f} | {planned:.1f} |"


def _of_cases(findings: Mapping[str, Counter[str]]) -> Iterator[str]:
    for function, what in GROUPS.items():
        names = [name for name, (of, *_) in CASES.items() if of.__name__ == function]
        yield f"| {what} | {len(names)} | {sum(findings[name].total() for name in names)} |"
    rows = sum(len(grid_of(index)) for index in range(len(ROUTES)))
    yield f"| every route, with a quarter of kernels x masks x layouts x sides | {rows} | `make test-all` |"


def with_rows(text: str, header: str, rows: Iterable[str]) -> str:
    """Return a page with these rows in the table of this header."""
    head, found, rest = text.partition(header)
    assert found, f"no table {header!r}"
    lines = rest.splitlines(keepends=True)
    after = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return head + header + "".join(f"{row}\n" for row in rows) + "".join(lines[after:])


def forget() -> None:
    """Forget what the package has cached of the devices that are there."""
    for each in _caches(sum(name.startswith("burst_mcore") for name in sys.modules)):
        each.cache_clear()


@functools.lru_cache
def _caches(modules: int) -> list[Any]:
    """Return the caches of the package, which has so many modules now; to look for them takes a while."""
    caches = [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]
    return [each for each in caches if str(each.__module__).startswith("burst_mcore")]


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        ranks.install(patch)
        findings = {name: run(name) for name in CASES}
        PAGE.write_text(page(PAGE.read_text(), findings))
        measure()
    sys.stderr.writelines(f"{text}\n" for each in findings.values() for text in each)


def measure() -> None:
    """Write the tables of passes."""
    passes = [of_pass(name, counted(name)) for name in PASSES]
    large = [of_large(setting, backward_of_q(*setting, head_dim=128)) for setting in LARGE]
    PAGE.write_text(with_rows(with_rows(PAGE.read_text(), OF_PASSES, passes), OF_LARGE, large))


if __name__ == "__main__":
    main()
