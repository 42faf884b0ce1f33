"""Runs Python scripts in processes forked from this one, where imports are done: most of a short run."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import socket
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from ranks import poison
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes


def start(name: str, entrypoint: str, args: dict[int, Any], **how: Any) -> PContext:
    """In place of torch's `start_processes` of interpreters, one a rank; args are their command lines."""
    assert entrypoint == sys.executable
    with (
        redirect_stdout(sys.__stdout__),
        redirect_stderr(sys.__stderr__),
    ):  # pytest has its own in their place
        return start_processes(name=name, entrypoint=_python, args=args, start_method="fork", **how)


def run(folder: Path, script: Path, ranks: int = 1) -> tuple[bool, str, str]:
    """(whether all ranks ended well, what they printed, their errors), in the environment of torchrun."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = start(
        name="script",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(ranks), (str(script),)),
        envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
    )
    try:
        ended = context.wait(timeout=240, period=0.05)
    finally:
        context.close()
    out, errors = (
        "".join(Path(log).read_text(errors="replace") for log in logs.values())
        for logs in (context.stdouts, context.stderrs)
    )
    return ended is not None and not ended.is_failed(), out, errors


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _python(*command: str) -> None:
    """Do what `python -W ignore *command` does, but for the start of an interpreter."""
    atexit._clear()
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
