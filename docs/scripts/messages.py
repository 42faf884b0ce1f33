"""Lists the error texts of the packages under the headings of docs/reference/messages.md.

A section of the page names its source files in a comment. `make docs` puts the error texts of these files
behind the comment; this script prints the page with the texts. A value in a text is shown as "…".
tests/house/test_docs.py fails if an error belongs to no section.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

from strings import Strings, words

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "messages.md"
MARK = re.compile(r"^<!-- errors of: (.*?) -->\n", re.MULTILINE | re.DOTALL)
RAISING = re.compile(r"\w*Error$|refuse$|fail$|error$|BadParameter$|[eE]xit$|stderr\.write$|no_argument$")
"""Names of what is called with the text of an error."""
WHY = re.compile(r"_?(why_no|wrong)")
"""Names of functions that return the text of an error."""
INTERNAL = {"burst_plan/explain/verify.py"}
"""Checks of what the package itself made: no user meets their texts."""


def with_messages(page: str) -> str:
    """Return the page with the lists of today's error texts."""
    head, *sections = MARK.split(page)
    written = [head]
    for globs, section in zip(sections[::2], sections[1::2], strict=True):
        _, heading, rest = section.partition("\n## ")
        listed = "".join(f"* {shown(text)}\n" for text in of_files(globs.split()))
        written.append(f"<!-- errors of: {globs} -->\n\n{listed}{heading}{rest}")
    return "".join(written)


def globs_of(page: str) -> list[str]:
    """Return the names of files in all comments of the page."""
    return [name for globs in MARK.findall(page) for name in globs.split()]


def of_files(globs: Sequence[str]) -> list[str]:
    """Return the texts of the errors of the files that match, each once, in the order of files."""
    texts = (
        text
        for path, of_path in messages().items()
        if any(fnmatch(path, g) for g in globs)
        for text in of_path
    )
    return list(dict.fromkeys(texts))


@lru_cache(maxsize=1)
def messages() -> Mapping[str, list[str]]:
    """Return the texts of each file that has some, by its path."""
    found = {}
    for package in ("burst_mcore", "burst_plan", "burst_bench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name not in INTERNAL and (texts := list(_texts(ast.parse(path.read_text())))):
                found[name] = texts
    return found


def shown(text: str) -> str:
    """Return a text as code of Markdown."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def _texts(tree: ast.Module) -> Iterator[str]:
    strings = Strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _raises(node):
            if pairs := _refusals(strings, node):
                yield from pairs
            else:
                texts = (text for argument in node.args for text in strings.texts(argument))
                yield from (text for text in texts if words(text) >= 2)
        elif isinstance(node, ast.FunctionDef):
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            reasons = returned if _says_why(node) else [each.elts[1] for each in returned if _is_reason(each)]
            texts = (text for reason in reasons for text in strings.texts(reason))
            yield from (text for text in texts if words(text) >= 2)


def _raises(call: ast.Call) -> bool:
    """Whether a call gets the text of an error."""
    to_errors = any(each.arg == "err" for each in call.keywords)  # typer.echo(..., err=True)
    return to_errors or RAISING.search(ast.unparse(call.func)) is not None


def _refusals(strings: Strings, call: ast.Call) -> list[str]:
    """Return the texts of an UnsupportedError: of a name and a reason, or a starred pair; none of others."""
    if ast.unparse(call.func).rpartition(".")[2] not in ("UnsupportedError", "refuse"):
        return []
    pairs = [call.args] if len(call.args) == 2 else []
    if len(call.args) == 1 and isinstance(call.args[0], ast.Starred):
        pairs = [leaf.elts for leaf in strings.leaves(call.args[0]) if isinstance(leaf, ast.Tuple)]
    texts = []
    for name, reason in pairs:
        names, reasons = strings.texts(name), [text for text in strings.texts(reason) if words(text)]
        shown = names[0] if len(names) == 1 else "…"
        texts += [f"unsupported ({shown}): {text}" for text in reasons or ["…"] * bool(shown)]
    return texts


def _says_why(function: ast.FunctionDef) -> bool:
    """Whether a function returns a reason, or something else where there is none."""
    returns = "" if function.returns is None else ast.unparse(function.returns)
    return (
        returns == "Rows"  # of burst_mcore.megatron.rules
        or "str" in returns.split(" | ")[1:]
        or returns.startswith("str |")
        or WHY.match(function.name) is not None
    )


def _is_reason(value: ast.expr) -> TypeGuard[ast.Tuple]:
    """Whether a value is a pair of nothing and the reason."""
    pair = isinstance(value, ast.Tuple) and len(value.elts) == 2
    return pair and ast.unparse(value.elts[0]) == "None"  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.stdout.write(with_messages(PAGE.read_text()))
