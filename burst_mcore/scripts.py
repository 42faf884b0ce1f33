"""Python scripts and modules that a launcher of ours runs in its own process, as python itself would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def script_of(command: Sequence[str], launcher: str, usage: str) -> Callable[[], object]:
    """Return a function that runs `command`: a script or `-m` and a module, with its arguments.

    sys.path and sys.argv are the script's from here on. Exits with a message where there is no such script
    or module.
    """
    if not command:
        sys.exit(usage)
    if command[0] in ("-h", "--help"):
        sys.stdout.write(f"{usage}\n")
        sys.exit(0)
    by_name = command[0] == "-m" and len(command) > 1
    name, arguments = command[by_name], command[1 + by_name :]
    if not by_name and not Path(name).is_file():
        sys.exit(f"{launcher}: no such script: {name}; --help shows the usage")
    sys.path.insert(0, os.getcwd() if by_name else str(Path(name).resolve().parent))  # as python does
    if by_name and not _is_module(name):
        sys.exit(f"{launcher}: no such module: {name}; --help shows the usage")
    sys.argv = [name, *arguments]
    if by_name:
        return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(name, run_name="__main__")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
