"""Follows an expression back to the strings that it may be: through names, loops, arguments and returns.

A module is read as text, not run. All bindings of a name count, in any order: a string too many does no harm.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from math import prod

MOST = 4
"""Texts that phrases in a text make, at most; of more the phrases follow alone, and the text has "…"."""

RECORDS = {"Setting"}
"""Classes whose objects have words about a key: an error names the key, and says none of them."""


class Strings:
    """The strings of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self._within: dict[ast.AST, ast.FunctionDef | None] = {}
        self._bound: dict[tuple[ast.FunctionDef | None, str], list[ast.expr]] = defaultdict(list)
        self._functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        self._texts: dict[ast.expr, list[str]] = {}
        self._read(tree, None)

    def _read(self, node: ast.AST, function: ast.FunctionDef | None) -> None:
        self._within[node] = function
        if isinstance(node, ast.FunctionDef):
            self._functions[node.name].append(node)
        elif isinstance(node, ast.Call):
            self._calls[_name(node.func)].append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, function)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
            self._bind(node.target, node.value, function)
        elif isinstance(node, ast.For | ast.comprehension):
            self._bind(node.target, node.iter, function)
        inner = node if isinstance(node, ast.FunctionDef) else function
        for child in ast.iter_child_nodes(node):
            self._read(child, inner)

    def _bind(self, target: ast.expr, value: ast.expr, function: ast.FunctionDef | None) -> None:
        if isinstance(target, ast.Name):
            self._bound[function, target.id].append(value)
        elif isinstance(target, ast.Tuple):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for number, each in enumerate(target.elts):
                self._bind(each, value.elts[number] if same else value, function)  # type: ignore[attr-defined]

    def texts(self, node: ast.expr) -> list[str]:
        """Return the texts that an expression may be, each once; "…" stands for a value."""
        if node not in self._texts:
            self._texts[node] = []  # for a name that is bound to itself, a function that calls itself
            texts = [text for leaf in self.leaves(node) for text in self._of_leaf(leaf)]
            self._texts[node] = list(dict.fromkeys(texts))
        return self._texts[node]

    def leaves(self, node: ast.expr) -> Iterator[ast.expr]:
        """Yield the strings, sums of strings, tuples and values that an expression may be."""
        seen, rest = {node}, [node]
        while rest:
            sources = list(self._sources(one := rest.pop()))
            if not sources:
                yield one
            rest += [source for source in reversed(sources) if source not in seen]
            seen.update(sources)

    def _sources(self, node: ast.expr) -> Iterator[ast.expr]:
        """Yield the expressions whose values a value may be."""
        match node:
            case ast.Name():
                yield from self._values(node)
            case ast.IfExp():
                yield from (node.body, node.orelse)
            case ast.BoolOp():
                yield from node.values
            case ast.Dict():
                yield from (each for each in (*node.keys, *node.values) if each is not None)
            case ast.List() | ast.Set():
                yield from node.elts
            case ast.Starred() | ast.Subscript() | ast.NamedExpr():
                yield node.value
            case ast.GeneratorExp() | ast.ListComp():
                yield node.elt
            case ast.Call():
                yield from self._results(node)

    def _values(self, name: ast.Name) -> Iterator[ast.expr]:
        function = self._within[name]
        while function is not None:
            if (function, name.id) in self._bound:
                yield from self._bound[function, name.id]
                return
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            keywords = [each.arg for each in function.args.kwonlyargs]
            if name.id in [*names, *keywords]:
                place = names.index(name.id) - (names[0] in ("self", "cls")) if name.id in names else None
                yield from self._arguments(function.name, name.id, place)
                return
            function = self._within[function]
        yield from self._bound.get((None, name.id), [])

    def _arguments(self, function: str, name: str, place: int | None) -> Iterator[ast.expr]:
        for call in self._calls[function]:
            yield from (each.value for each in call.keywords if each.arg == name)
            if place is not None and 0 <= place < len(call.args):
                yield call.args[place]

    def _results(self, call: ast.Call) -> Iterator[ast.expr]:
        functions = self._functions.get(_name(call.func), [])
        for each in (each for function in functions for each in ast.walk(function)):
            if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) and each.value is not None:
                yield each.value
        if not functions and _name(call.func) not in RECORDS:  # next(...), "; ".join(...), words.items()
            yield from call.args
            yield from [call.func.value] if isinstance(call.func, ast.Attribute) else []

    def _of_leaf(self, leaf: ast.expr) -> list[str]:
        match leaf:
            case ast.Constant(value=str(text)):
                return [re.sub(r"\s+", " ", text.removesuffix("\n"))]
            case ast.JoinedStr():
                texts = self._joined([self._of_part(part) for part in leaf.values])
                return [re.sub(r"\s+", " ", text).removesuffix(" ") for text in texts]
            case ast.BinOp(op=ast.Add()):
                return self._joined([self.texts(leaf.left), self.texts(leaf.right)])
            case ast.BinOp(op=ast.Mult()):  # a text where a condition holds, else none
                texts = [text for text in self.texts(leaf.left) if words(text)]
                return [*texts, ""] if texts else ["…"]
            case ast.Tuple():
                return [text for each in leaf.elts for text in self.texts(each)]
        return ["…"]

    def _of_part(self, part: ast.expr) -> list[str]:
        """Return what a part of an f-string may be: itself, or phrases for a value, or "…"."""
        if isinstance(part, ast.FormattedValue):
            phrases = [text for text in self.texts(part.value) if words(text) >= 2]
            others = [text for text in self.texts(part.value) if words(text) < 2]
            return phrases + ["" if phrases and set(others) == {""} else "…"] * bool(others or not phrases)
        return [str(part.value)]  # type: ignore[attr-defined]

    @staticmethod
    def _joined(parts: list[list[str]]) -> list[str]:
        """Return the texts made of one of each part; where these are many, parts that differ follow alone."""
        parts = [part or ["…"] for part in parts]
        if prod(map(len, parts)) <= MOST:
            return ["".join(chosen) for chosen in product(*parts)]
        alone = [text for part in parts if len(part) > 1 for text in part]
        return ["".join(part[0] if len(part) == 1 else "…" for part in parts), *alone]


def words(text: str) -> int:
    """Return the number of words of a text; ring=double is none."""
    return sum(re.search("[A-Za-z]{2}", word) is not None and "=" not in word for word in text.split())


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
