"""Files that a command will write: whether they can be written is checked before anything is computed."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path | None) -> None:
    """Check that a file, if any, can be written, before anything is computed; leave nothing behind.

    Raises:
        ValueError: a path whose folder is missing, or that is not writable.
    """
    if path is None:
        return
    if not path.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path}")
    try:
        new = not path.exists()
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; give another path") from None
    if new:
        path.unlink(missing_ok=True)  # another rank may have tried it, too
