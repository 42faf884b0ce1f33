"""Plants faults in functions of the package that are imported already, and takes them out again.

The file's text is changed and compiled, and every function that was made of the file gets the new code. So
all who hold the function have the fault, whether by a table, a decorator or an import of its name.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType

import burst_mcore

ROOT = Path(burst_mcore.__file__).parent


@contextlib.contextmanager
def planted(file: str, old: str, new: str) -> Iterator[None]:
    """Run with another text in a file of the package; AssertionError unless `old` is there, once."""
    path = ROOT / file
    source = path.read_text()
    assert source.count(old) == 1, f"burst_mcore/{file} has {source.count(old)} times the text {old!r}"
    codes = dict(_codes(compile(source.replace(old, new), str(path), "exec", dont_inherit=True)))
    functions = [f for f in _functions(str(path)) if f.__code__.co_qualname in codes]
    before = [f.__code__ for f in functions]
    assert functions, f"no function of {file} is imported"
    try:
        for function, code in zip(functions, before, strict=True):
            changed = codes[code.co_qualname]
            if changed.co_freevars == code.co_freevars:
                function.__code__ = changed
        yield
    finally:
        for function, code in zip(functions, before, strict=True):
            function.__code__ = code


@lru_cache
def _functions(path: str) -> list[FunctionType]:
    return [x for x in gc.get_objects() if type(x) is FunctionType and x.__code__.co_filename == path]


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield the functions in a code, with their qualified names."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)
