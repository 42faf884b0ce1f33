"""Runs Python scripts in processes forked from this one, where imports are done: most of a short run."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import runpy
import socket
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import limits
from ranks import poison
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult


def start(name: str, entrypoint: str, args: dict[int, Any], **how: Any) -> PContext:
    """In place of torch's `start_processes` of interpreters, one a rank; args are their command lines."""
    assert entrypoint == sys.executable
    with (
        redirect_stdout(sys.__stdout__),
        redirect_stderr(sys.__stderr__),
    ):  # pytest has its own in their place
        return start_processes(name=name, entrypoint=_python, args=args, start_method="fork", **how)


def run(
    folder: Path, *command: object, ranks: int = 1, seconds: float = limits.SECONDS
) -> tuple[bool, str, str]:
    """(whether all ranks ended well, what they printed, their errors), in the environment of torchrun.

    command: a script, or -m and a module, and arguments.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = start(
        name="script",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(ranks), tuple(map(str, command))),
        envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
    )
    ended = _ended(context, f"{command[0]} on {ranks} ranks", seconds)
    out, errors = (
        "".join(Path(log).read_text(errors="replace") for log in logs.values())
        for logs in (context.stdouts, context.stderrs)
    )
    return not ended.is_failed(), out, errors


def ends(
    folder: Path, command: list[str], places: list[dict[str, str]], seconds: float = limits.SECONDS
) -> list[tuple[int, str]]:
    """(exit status, errors) of the same command at each of `places`; none is ended because of another."""
    contexts = []
    for rank, place in enumerate(places):
        (log := folder / f"log{rank}").mkdir()
        logs = DefaultLogsSpecs(log_dir=str(log), redirects=Std.ALL)
        args = {0: tuple(command)}
        contexts.append(start("rank", sys.executable, args, envs={0: place}, logs_specs=logs))
    statuses = []
    for context in contexts:
        failures = _ended(context, " ".join(command), seconds).failures
        statuses.append(failures[0].exitcode if failures else 0)
    return [
        (status, Path(context.stderrs[0]).read_text())
        for status, context in zip(statuses, contexts, strict=True)
    ]


def _ended(context: PContext, what: str, seconds: float) -> RunProcsResult:
    try:
        ended = context.wait(timeout=seconds, period=0.05)
    finally:
        context.close()
    if ended is None:
        said = "".join(Path(log).read_text(errors="replace") for log in context.stderrs.values())
        raise limits.hit(f"{what}, which wrote {said[-2000:]!r}, did not end", seconds)
    return ended


def free_port() -> int:
    """A port that nobody listens at, below those that systems give to connections at any time."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _python(*command: str) -> None:
    """Do what `python -W ignore *command` does, but for the start of an interpreter."""
    os.setsid()  # as torch's interpreters do: a rank is ended with all that it started
    atexit._clear()
    gc.freeze()  # to collect among all that came with the fork takes a quarter of a second, each time
    poison(False)
    warnings.simplefilter("ignore")
    logging.getLogger().handlers.clear()  # pytest's, which would keep what is logged
    module = command[0] == "-m"
    sys.argv = [*command[module:]]
    try:
        if module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            sys.stderr.write(end.code if isinstance(end.code, str) else "")
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    finally:
        atexit._run_exitfuncs()
