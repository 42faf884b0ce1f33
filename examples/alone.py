"""One run at a time in a folder: two would spoil each other's metrics and checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class TakenError(RuntimeError):
    """Another run writes to the folder."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder for this run; it is free again however the run ends.

    Raises:
        TakenError: another run holds it.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TakenError(f"another run writes to {folder}: wait until it ends, or stop it") from None
        yield
