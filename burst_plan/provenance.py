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

PACKAGES = "burst_mcore", "burst_plan", "burst_bench"
LIBRARIES = """megatron-core deepspeed transformers triton flash-attn flash_attn_3 flash-attn-4
transformer-engine liger-kernel cut-cross-entropy"""
"""Packages whose versions are recorded if they are installed."""


def made_by(device: str) -> dict[str, Any]:
    """Return the provenance of a figure: commit, machine and versions."""
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    machine = f"{os.cpu_count()} cores, {platform.machine()}{gpu}"
    return {"commit": commit(), "machine": machine, "versions": versions(device)}


def versions(device: str) -> dict[str, str]:
    """Return the versions of Python, torch, the installed libraries, and the GPU's driver."""
    facts = {"burst_mcore": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in LIBRARIES.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    if device == "cuda":
        driver = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        facts["driver"] = driver or "unknown: no nvidia-smi"
    return facts


def commit() -> str:
    """Return the commit as git names it, with "-dirty" if files of a package were changed since."""
    git = "git", "-C", str(Path(__file__).parent.parent)
    if not _answer(*git, "ls-files", __file__):  # a package installed inside another checkout is not it
        return "unknown: not in a git checkout"
    head = _answer(*git, "rev-parse", "--short=12", "HEAD")
    changed = _answer(*git, "status", "--porcelain", "--untracked-files=no", "--", *PACKAGES)
    return f"{head}-dirty" if changed else head


def _answer(*command: str) -> str:
    """Return the output of a command; nothing if there is no such command, or it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()
