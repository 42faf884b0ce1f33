"""Finds the error texts of the packages, for the lists of docs/reference/messages.md.

A section of the page names its files in a comment; the texts of the errors of these files follow. A value in
a text is shown as "…". tests/house/test_docs.py fails if an error belongs to no section.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^<!-- errors of: (.*?) -->\n", re.MULTILINE | re.DOTALL)
RAISING = re.compile(r"\w*Error$|refuse$|fail$|error$|BadParameter$|Exit$|no_argument$")
"""Names of what is called with the text of an error."""


def with_messages(page: str) -> str:
    """Return the page with the lists of today's texts."""
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
            if texts := list(_texts(ast.parse(path.read_text()))):
                found[str(path.relative_to(ROOT))] = texts
    return found


def shown(text: str) -> str:
    """Return a text as code of Markdown."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def _texts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and RAISING.search(ast.unparse(node.func)):
            texts = [_text(argument) for argument in node.args]
            if ast.unparse(node.func).endswith("RefusedError"):
                name, text = [*texts, None, None][:2]
                yield f"refused ({name or '…'}): {text or '…'}"
            else:
                yield from (text for text in texts if _is_sentence(text))
        elif isinstance(node, ast.FunctionDef) and _says_why(node):
            returned = (
                _text(each.value) for each in ast.walk(node) if isinstance(each, ast.Return) and each.value
            )
            yield from (text for text in returned if _is_sentence(text))


def _says_why(function: ast.FunctionDef) -> bool:
    """Whether a function returns a reason, or None."""
    return function.returns is not None and ast.unparse(function.returns) == "str | None"


def _is_sentence(text: str | None) -> bool:
    return text is not None and len(re.findall(r"[A-Za-z]{2,}", text)) >= 3


def _text(node: ast.expr | None) -> str | None:
    """Return the text that an expression makes, "…" for its values; None where it makes none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _one_line(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return _one_line("".join(parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_text(node.left) or '…'}{_text(node.right) or '…'}"
    if isinstance(node, ast.IfExp):
        return _text(node.body) or _text(node.orelse)
    return None


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
