"""The execution of Python programs in a launcher's process, like python itself."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path


def launch(launcher: str, prepare: Callable[[], object]) -> None:
    """Run the program on the command line of `python -m launcher`, after `prepare`.

    Ranks that the program starts by torchrun, as in `trl sft`, run under the launcher, too.
    """
    usage = f"usage: python -m {launcher} SCRIPT [ARGUMENTS]; SCRIPT: a file, -m MODULE, or a command as trl"
    run = script_of(sys.argv[1:], launcher, usage)
    prepare()
    if "LOCAL_RANK" in os.environ:  # a rank, which starts no others
        run()
    else:
        with tempfile.TemporaryDirectory(prefix="burst_mcore-") as folder:
            os.environ["PYTHON_EXEC"] = _python_of_ranks(folder, launcher)
            run()


def _python_of_ranks(folder: str, launcher: str) -> str:
    """Write the executable that torchrun starts instead of python; its first argument is -u."""
    python = Path(folder, "python")
    executable = shlex.quote(os.environ.get("PYTHON_EXEC", sys.executable))
    python.write_text(f'#!/bin/sh\n[ "$1" = -u ] && shift\nexec {executable} -u -m {launcher} "$@"\n')
    python.chmod(0o700)
    return str(python)


def script_of(command: Sequence[str], launcher: str, usage: str) -> Callable[[], object]:
    """Return a function that runs `command`: a script, `-m` and a module, or a console script, and arguments.

    A console script is a command of an installed package, such as trl. This sets sys.path and sys.argv for
    the program. Exits with a message if the program is missing.
    """
    if not command:
        sys.exit(usage)
    if command[0] in ("-h", "--help"):
        sys.stdout.write(f"{usage}\n")
        sys.exit(0)
    by_name = command[0] == "-m" and len(command) > 1
    name = command[by_name]
    sys.argv = [name, *command[1 + by_name :]]
    if by_name:
        sys.path.insert(0, os.getcwd())  # as python does
        if _is_module(name):
            return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
        sys.exit(f"{launcher}: no such module: {name}; --help shows the usage")
    if Path(name).is_file():
        sys.path.insert(0, str(Path(name).resolve().parent))
        return lambda: runpy.run_path(name, run_name="__main__")
    for console_script in entry_points(group="console_scripts", name=name):
        return lambda: sys.exit(console_script.load()())
    sys.exit(f"{launcher}: no such script: {name}; --help shows the usage")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
