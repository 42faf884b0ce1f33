"""The origin of figures: the code and the machine that made them."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from burst_mcore.version import __version__

LIBRARIES = (
    *("megatron-core", "deepspeed", "transformers", "triton", "flash-attn", "flash_attn_3", "flash-attn-4"),
    *("transformer-engine", "liger-kernel", "cut-cross-entropy"),
)
"""Packages whose versions are told, where they are installed."""


def made_by(device: str) -> dict[str, Any]:
    """Return the facts that may change a figure: commit, machine and versions."""
    return {"commit": commit(), "machine": machine(device), "versions": versions(device)}


def machine(device: str) -> str:
    """Cores, architecture and GPU."""
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return f"{os.cpu_count()} cores, {platform.machine()}{gpu}"


def versions(device: str) -> dict[str, str]:
    """Return the versions of Python, torch, the installed libraries, and the GPU's driver."""
    known = {"burst_mcore": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[package] = metadata.version(package)
    if device == "cuda":
        cudnn = torch.backends.cudnn.version()
        known |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn), "driver": _driver()}
    return known


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown: no nvidia-smi"


def commit() -> str:
    """Return the commit as git names it, with "-dirty" if files of the package were changed since."""
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
