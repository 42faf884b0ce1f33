"""How long tests wait for other processes and threads, and what is said when a wait ends without them.

Every wait of a test is of this file. What is waited for ends long before, unless it hangs.
"""

from __future__ import annotations

import os
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SECONDS = 1200 * float(os.environ.get("TEST_PATIENCE", "1"))
"""Five times what the dearest test of `make test`, of 30 CPU seconds, takes on a machine 8 times slower."""

OF_A_GROUP = timedelta(seconds=SECONDS / 2)
"""Of gloo: a rank says which message did not come, and is heard before its process is killed."""

AT_ONCE = SECONDS / 8
"""Seconds. An error that takes less came because a rank told of it, and not by a limit of its group."""

TO_END = SECONDS / 120
"""Seconds. Of a process that has answered, and is killed afterwards, which fails no test."""


def hit(what: str, seconds: float) -> AssertionError:
    """Return the error of a wait for `what` that ended after so many seconds: name it, and what to do."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "a script").removesuffix(" (call)")
    return AssertionError(
        f"{test}: {what} within the limit of {seconds:g} s. The test hangs, or this machine is slow or busy: "
        "TEST_PATIENCE=4 in the environment makes all limits of tests four times as long"
    )


def until(holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Look ten times a second until `holds()`; `what` did not happen if that takes too long."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise hit(what, seconds)
        time.sleep(0.1)


def taken(box: queue.Queue[Any], seconds: float = SECONDS, failed: threading.Event | None = None) -> Any:
    """Return what another thread puts into a box; give up within a second where `failed` is set."""
    deadline = time.monotonic() + seconds
    while failed is None or not failed.is_set():
        try:
            return box.get(timeout=min(1, seconds))
        except queue.Empty:
            if time.monotonic() > deadline:
                raise hit("no message came from another thread", seconds) from None
    raise AssertionError("another rank failed, and a message of it or of others did not come")


def keys(store: Any, *names: str, seconds: float = OF_A_GROUP.total_seconds()) -> None:
    """Wait until other ranks have set these keys of torch's store."""
    try:
        store.wait(list(names), timedelta(seconds=seconds))
    except RuntimeError:
        raise hit(f"no other rank said {', '.join(names)}", seconds) from None


def told(process: subprocess.Popen[str], seconds: float = SECONDS) -> str:
    """Wait for the end of a process, and return what it wrote to its standard error."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise hit(f"{shlex.join(map(str, process.args))} did not end", seconds) from None


def run(command: list[Any], seconds: float = SECONDS, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit status, and return what it wrote, as text."""
    command = [str(word) for word in command]
    try:
        return subprocess.run(
            command, timeout=seconds, capture_output=True, text=True, check=False, **options
        )
    except subprocess.TimeoutExpired as late:
        said = f"; it wrote {late.stderr!r:.2000}" if late.stderr else ""
        raise hit(f"{shlex.join(command)} did not end{said}", seconds) from None
