"""A tree of Megatron's source: names its version; checks, applies, reverts and prints patches."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from burst_plan.patch import insertions
from burst_plan.patch.insertions import Insertion, UnknownSourceError

BACKEND, OPTIONS = "backend", "backend-and-options"
"""The patches; the second includes the first."""
OLDEST, NEWEST = (0, 16, 1), (0, 20)
"""Versions of Megatron-Core that the patches support; the newest with any third number."""
OURS = re.compile("burst_mcore|context_parallel_attention_backend|around_checkpointed")
"""Names that no file of Megatron has without a patch."""


class UnknownTreeError(ValueError):
    """The folder is no tree of a known version of Megatron."""


def patch_text(name: str) -> str:
    """Return the text of a patch. Raises FileNotFoundError if this package was installed without its data."""
    file = Path(__file__).resolve()
    # A checkout has the folder at its root; an installed package has it as data within.
    for folder in (file.parents[2] / "patches", file.parents[1] / "patches"):
        path = folder / "megatron-core" / f"{name}.patch"
        if path.is_file():
            return path.read_text()
    raise FileNotFoundError(f"no {name}.patch beside {file}: install burst-mcore from a wheel or a checkout")


class SourceTree:
    """A checkout of Megatron-LM, or a folder into which megatron-core is installed.

    Args:
        root: the folder that holds megatron/core.

    Raises:
        UnknownTreeError: it does not, or its version is unsupported.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        info = root / "megatron" / "core" / "package_info.py"
        if not info.is_file():
            raise UnknownTreeError(f"{root} is no tree of Megatron: it has no megatron/core/package_info.py")
        numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))
        version = tuple(int(numbers.get(name, -1)) for name in ("MAJOR", "MINOR", "PATCH"))
        self.version = f"megatron-core {'.'.join(map(str, version))}{_branch(root)}"
        if not version >= OLDEST or version[:2] > NEWEST:
            oldest, newest = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
            raise UnknownTreeError(f"{root} has {self.version}: the patches support {oldest} to {newest}")

    def check(self, name: str) -> str:
        """Return a sentence on the tree's version, and whether it has a patch.

        Raises:
            UnknownTreeError: the source around a place is of no known version, or was edited by hand.
        """
        is_patched = all(each.is_in(file.lines) for file in self._files(name) for each in file.insertions)
        return self._told(f"{name}.patch {'is there' if is_patched else 'fits'}")

    def apply(self, name: str) -> str:
        """Add a patch, and return a message; twice is once. Raises UnknownTreeError as `check`."""
        lines = self._rewrite(self._files(name), adds=True)
        return self._told(f"{name}.patch {f'is applied, {lines} lines' if lines else 'is there already'}")

    def revert(self, _: str = OPTIONS) -> str:
        """Remove all lines of all patches, and return a message. Raises UnknownTreeError as `check`."""
        files = self._files(OPTIONS, lambda text: bool(OURS.search(text)))
        lines = self._rewrite(files, adds=False)
        return self._told(f"{lines} lines taken out" if lines else "it has no line of ours")

    def _told(self, words: str) -> str:
        return f"{self.root}: {self.version}: {words}\n"

    def numbered(self, name: str) -> str:
        """Return the patch with the line numbers of this tree, for `git apply --unidiff-zero`.

        Raises:
            UnknownTreeError: as `check`, or the tree is patched already.
        """
        lines = patch_text(name).split("\ndiff ")[0].split("\n")
        for file in self._files(name):
            if file.lines != insertions.edited(file.insertions, file.lines, adds=False):
                raise UnknownTreeError(f"{self.root} is patched: print the patch for a tree that is not")
            lines += [f"diff --git a/{file.name} b/{file.name}", f"--- a/{file.name}", f"+++ b/{file.name}"]
            lines += insertions.hunks(file.insertions, file.lines)
        return "\n".join([*lines, ""])

    def _rewrite(self, files: Sequence[_File], *, adds: bool) -> int:
        changed = [(file, insertions.edited(file.insertions, file.lines, adds=adds)) for file in files]
        for file, lines in changed:
            if lines != file.lines:
                _write(self.root / file.name, file.end.join(lines))
        return sum(abs(len(lines) - len(file.lines)) for file, lines in changed)

    def _files(self, name: str, wanted: Callable[[str], bool] | None = None) -> list[_File]:
        """Return the files of a patch, or its files whose text is wanted, with every place located."""
        by_name: dict[str, list[Insertion]] = defaultdict(list)
        for insertion in insertions.parse(patch_text(name)):
            by_name[insertion.file].append(insertion)
        files = []
        for path, of_file in by_name.items():
            if not (self.root / path).is_file():
                if wanted is not None:
                    continue
                raise UnknownTreeError(
                    f"{self.root} ({self.version}) has no {path}, which {name}.patch needs"
                )
            text = (self.root / path).read_bytes().decode()
            if wanted is not None and not wanted(text):
                continue
            end = "\r\n" if "\r\n" in text else "\n"
            file = _File(path, tuple(of_file), text.split(end), end)
            try:
                plain_lines = insertions.edited(of_file, file.lines, adds=False)
            except UnknownSourceError as error:
                raise UnknownTreeError(f"{self.root} ({self.version}) is not known: {error}") from error
            if foreign := next(filter(OURS.search, plain_lines), None):
                raise UnknownTreeError(
                    f"{self.root} ({self.version}) has a line that no patch put there, in {path}: "
                    f"{foreign.strip()}"
                )
            files.append(file)
        return files


def _branch(root: Path) -> str:
    """Return ", branch dev" for branch dev, which a field identifies: its version number is a release's."""
    config = root / "megatron" / "core" / "model_parallel_config.py"
    return ", branch dev" if config.is_file() and "dynamic_context_parallel:" in config.read_text() else ""


@dataclass(frozen=True)
class _File:
    name: str
    insertions: tuple[Insertion, ...]
    lines: list[str]
    end: str


def _write(path: Path, text: str) -> None:
    """Write in one step, keeping the file's mode: readers see the old file or the new one."""
    beside = path.with_name(f".{path.name}.burst-mcore")
    beside.write_bytes(text.encode())
    shutil.copymode(path, beside)
    os.replace(beside, path)
