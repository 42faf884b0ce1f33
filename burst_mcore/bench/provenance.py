"""Where figures come from: the code and the machine that made them."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch


def made_by() -> dict[str, str]:
    """The commit of this code, if it lies in a git checkout, and the machine."""
    return {"commit": commit(), "machine": machine()}


def machine() -> str:
    """Cores, and the versions that matter."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def commit() -> str:
    """As git names it, with "-dirty" where files of the package were changed since."""
    here = Path(__file__).parent.parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not in a git checkout"
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
