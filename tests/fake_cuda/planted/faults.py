"""The faults of `faults.txt`: changes of the package's text, each with a case that shows it.

A fault is its name after ##; its file, the case, and the kinds of finding of which one at least must come;
the lines that go (-), and those that come in their place (+).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    case: str
    """A name of `test_fake_cuda.CASES`."""
    kinds: frozenset[str]
    old: str
    new: str


def _fault(text: str) -> Fault:
    name, where, *lines = text.strip().splitlines()
    file, case, kinds = where.removeprefix("in ").split("; ")
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
    return Fault(name, file, case, frozenset(kinds.split()), old, new)


FAULTS = [_fault(text) for text in Path(__file__).with_name("faults.txt").read_text().split("## ")[1:]]
