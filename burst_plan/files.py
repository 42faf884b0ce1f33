"""Files that a command will write: whether they can be written is checked before anything is computed."""

from __future__ import annotations

from pathlib import Path


def check_writable(*paths: Path | None) -> None:
    """Check that files can be written, before anything is computed; leave nothing behind.

    Raises:
        ValueError: a path whose folder is missing, that is not writable, or that is given twice.
    """
    targets = [path for path in paths if path is not None]
    if len({path.resolve() for path in targets}) < len(targets):
        raise ValueError(f"two files are to be written to {targets[0]}: give each a path of its own")
    for path in targets:
        if not path.resolve().parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path}")
        try:
            new = not path.exists()
            path.open("a").close()
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; give another path") from None
        if new:
            path.unlink(missing_ok=True)  # another rank may have tried it, too
