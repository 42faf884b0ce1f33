"""A patch as data: blocks of lines, each with its place in Megatron's source.

The patches are zero-context diffs of added lines, for `git apply --unidiff-zero`. Git places such lines by
their numbers, which differ from version to version. So each hunk also names its place, after the second @@:

    @@ -381,0 +382,3 @@ Attention.__init__, before self.core_attention = [9f86d081]

The lines go before the one statement of Attention.__init__ that begins with these words, and above its
comment. The brackets hold digests of the statement, without white space, one for each known form. A statement
with another digest raises an error.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_HUNK = re.compile(
    r"^@@ -\d+,0 \+\d+(?:,\d+)? @@ (?P<scope>[\w.]+), before (?P<start>.+) \[(?P<digests>[\w, ]*)\]$"
)


class UnknownSourceError(ValueError):
    """A source file in which a block of lines has no known place."""


@dataclass(frozen=True)
class Insertion:
    """A block of lines, and its place in a source file."""

    file: str
    """Path from the root of the tree."""
    scope: str
    """Qualified name of the function or class, or "module"."""
    start: str
    """The beginning of the statement after the lines."""
    digests: tuple[str, ...]
    """Digests of that statement, in the known versions."""
    lines: tuple[str, ...]

    def line(self, source: Sequence[str]) -> int:
        """Return the index of the line after the block, whether or not the block is there already.

        Raises:
            UnknownSourceError: no such statement, several, or one of unknown form.
        """
        text = "\n".join(source)
        try:
            within = _statements(ast.parse(text), self.scope)
            statements = [s for s in within if source[s.lineno - 1].lstrip().startswith(self.start)]
        except SyntaxError as error:
            raise UnknownSourceError(f"{self.file} is no Python source: {error}") from error
        if len(statements) != 1:
            raise UnknownSourceError(
                f"{self.file}: expected one statement {self.start!r} in {self.scope}, got {len(statements)}"
            )
        (statement,) = statements
        indent = _indent(self.lines[0])
        if statement.col_offset != indent or _digest(source, statement) not in self.digests:
            raise UnknownSourceError(
                f"{self.file}: {self.scope}, the statement {self.start!r} is not as in any version that is "
                f"known (digest {_digest(source, statement)}, known are {', '.join(self.digests)})"
            )
        index = statement.lineno - 1
        while source[index - 1].lstrip().startswith("#") and _indent(source[index - 1]) == indent:
            index -= 1
        return index

    def is_in(self, source: Sequence[str]) -> bool:
        """Return whether the block is in its place. Raises UnknownSourceError as `line`."""
        end = self.line(source)
        return tuple(source[max(0, end - len(self.lines)) : end]) == self.lines


def parse(patch: str) -> list[Insertion]:
    """Return the insertions of a patch file, in its order.

    Raises:
        ValueError: a hunk with other than added lines, or without a named place.
    """
    insertions: list[Insertion] = []
    file = ""
    for line in patch.splitlines():
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif line.startswith("@@"):
            hunk = _HUNK.match(line)
            if hunk is None:
                raise ValueError(f"a hunk must have added lines alone and a named place, got {line!r}")
            digests = tuple(hunk["digests"].split(", "))
            insertions.append(Insertion(file, hunk["scope"], hunk["start"], digests, ()))
        elif file and line.startswith("+"):
            insertions[-1] = replace(insertions[-1], lines=(*insertions[-1].lines, line[1:]))
        elif file and not line.startswith(("diff ", "--- ")):
            raise ValueError(f"a patch must have added lines alone, got {line!r}")
    return insertions


def edited(insertions: Sequence[Insertion], source: Sequence[str], *, adds: bool) -> list[str]:
    """Return `source` with all of these blocks, or without any; all insertions must be of this file."""
    result = list(source)
    for insertion in insertions:
        if insertion.is_in(result) != adds:
            end = insertion.line(result)
            result[end - (0 if adds else len(insertion.lines)) : end] = insertion.lines if adds else ()
    return result


def hunks(insertions: Sequence[Insertion], source: Sequence[str]) -> Iterator[str]:
    """Return the lines of a zero-context diff that adds these blocks to `source`, which has none of them."""
    places = sorted(((insertion.line(source), insertion) for insertion in insertions), key=lambda x: x[0])
    before = 0
    for index, insertion in places:
        count = len(insertion.lines)
        digests = ", ".join(insertion.digests)
        place = f"{insertion.scope}, before {insertion.start} [{digests}]"
        yield f"@@ -{index},0 +{index + before + 1},{count} @@ {place}"
        yield from (f"+{line}" for line in insertion.lines)
        before += count


def _statements(tree: ast.Module, scope: str) -> Iterator[ast.stmt]:
    """Return the statements of a function or class, without those of inner functions."""
    body: list[ast.stmt] = tree.body
    for name in [] if scope == "module" else scope.split("."):
        inner = [node for node in body if getattr(node, "name", None) == name]
        if len(inner) != 1:
            return
        body = inner[0].body  # type: ignore[attr-defined]
    waiting = list(body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]


def _digest(source: Sequence[str], statement: ast.stmt) -> str:
    """Return the digest of a statement's text without white space; of a compound statement up to its body."""
    end = statement.end_lineno or statement.lineno
    if body := getattr(statement, "body", None):
        end = max(statement.lineno, body[0].lineno - 1)
    text = "".join("".join(source[statement.lineno - 1 : end]).split())
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
