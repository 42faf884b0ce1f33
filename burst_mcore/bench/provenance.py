"""Where figures come from: the code and the machine that made them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def as_json(what: Any, device: str = "", **figures: Any) -> str:
    """A file of results: what was measured, the commit and the machine that made it, and the figures."""
    machines = f"{device}, {machine()}" if device else machine()
    return json.dumps({"what": what, "commit": commit(), "machine": machines, **figures}, indent=1) + "\n"


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
        _git(here, "ls-files", "--error-unmatch", __file__)  # not a package installed inside another checkout
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not in a git checkout"
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
