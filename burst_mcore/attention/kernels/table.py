"""The table of local kernels, and the choice of one for a call."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import MutableMapping
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from burst_mcore import packages
from burst_mcore.attention.geometry.tiles import LARGE, LAUNCH, Launches
from burst_mcore.attention.kernels.kernel import Kernel, Problem
from burst_mcore.attention.kernels.wrappers import takes_delta

logger = logging.getLogger("burst_mcore")


class _Table(UserDict[str, Any]):
    """Kernels by name, imported lazily: a row is the kernel's file name until the first use."""

    def __getitem__(self, name: str) -> Any:
        row = self.data[name]
        if isinstance(row, str):
            file = import_module(f"burst_mcore.attention.kernels.{row}")
            row = self.data[name] = next(kernel for kernel in file.KERNELS if kernel.name == name)
        return row


_FILES = {
    "aten-cpu": "cpu",
    "cudnn": "aten",
    "aten-flash": "aten",
    "flash2": "flash",
    "flash3": "flash",
    "flash4": "flash",
    "triton": "triton",
    "reference": "reference",
}
KERNELS: MutableMapping[str, Kernel] = _Table(_FILES)
"""All kernels by name."""

PREFERENCE: dict[int | None, tuple[str, ...]] = {
    8: ("flash2", "aten-flash", "cudnn", "triton"),
    9: ("flash3", "flash4", "cudnn", "flash2", "aten-flash", "triton"),
    10: ("flash4", "cudnn", "flash2", "aten-flash", "triton"),
    None: ("cudnn", "aten-flash", "flash2", "triton"),
}
"""Names that "auto" tries on CUDA, by major compute capability, fastest first; None: any other device.
Only our own kernel, "triton", takes float32.
The order is a guess: this project has measured none of these kernels yet. "auto" never chooses a kernel that
is neither here nor in `by_rank` for the CPU."""
OWN = 1.6
"""The time of a pair in our own kernel over the time in a stock kernel."""


@lru_cache(maxsize=1024)
def choose(name: str, problem: Problem) -> Kernel:
    """Return the kernel called `name`, or for "auto" the first of `by_rank` that supports the problem.

    The choice is logged once for each problem. If "auto" ends at the reference kernel, which is slow and
    stores all scores, the log is a warning with the reasons why other kernels are unsupported.

    Raises:
        ValueError: unknown name, or the kernel does not support the problem (with its reason).
    """
    if name != "auto":
        if name not in KERNELS:
            raise ValueError(f"unknown kernel {name!r}; legal: 'auto', {', '.join(map(repr, KERNELS))}")
        kernel = KERNELS[name]
        reason = kernel.supports(problem)
        if reason is not None:
            raise ValueError(f"kernel {name!r} does not support this call: {reason}")
        logger.info("kernel %s for %s, as asked", name, problem)
        return kernel
    refusals: list[str] = []
    for each in by_rank(problem.device, problem.launches):
        kernel = KERNELS[each]
        reason = kernel.supports(problem)
        if reason is None:
            level = logging.WARNING if kernel.name == "reference" else logging.INFO
            logger.log(level, "kernel %s for %s%s", kernel.name, problem, _why(kernel, problem, refusals))
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    raise ValueError(f"no kernel supports this call{_because(refusals)}")


def taking_delta(name: str, problem: Problem) -> Kernel:
    """Return a kernel like `choose`, but only of kernels that accept any D, not only rowsum(dO * O).

    Raises:
        ValueError: no such kernel, or the named kernel does not accept any D.
    """
    refusals = []
    ranked = by_rank(problem.device, problem.launches)
    for each in ranked if name == "auto" else [name]:
        kernel = takes_delta(KERNELS[each])
        reason = kernel.supports(problem)
        if reason is None:
            return kernel
        refusals.append(f"{each}: {reason}")
    raise ValueError(f"a gradient came through lse, which no kernel here takes{_because(refusals)}")


def by_rank(device: str, launches: Launches = LARGE) -> list[str]:
    """Return the names of kernels in the order in which "auto" tries them; the reference is the last.

    On CUDA `PREFERENCE` is sorted by the estimated time of a pair. The overhead of a launch is that of LAUNCH
    pairs: so kernels that take a mask in few launches come first where the launches of other kernels would
    be small. The order is a guess, like `PREFERENCE`.
    """
    if device == "cpu":
        return ["aten-cpu", "reference"]
    capability = packages.capability()
    names = PREFERENCE.get(capability[0] if capability else None, PREFERENCE[None])
    return [*sorted(names, key=partial(_time, launches)), "reference"]


def _time(launches: Launches, name: str) -> float:
    """Return the time of a pair in a kernel's launches over the time in a stock kernel's large launches."""
    abilities = KERNELS[name].abilities
    return (OWN if abilities.pieces else 1.0) * (1.0 + LAUNCH / 2.0 ** launches.of(abilities))


def _why(kernel: Kernel, problem: Problem, refusals: list[str]) -> str:
    words, launches = _because(refusals), problem.launches
    if problem.device == "cpu" or by_rank(problem.device, launches) == by_rank(problem.device):
        return words
    size = f"2^{launches.of(kernel.abilities)} pairs a launch, others 2^{launches.alone}"
    return f", by the launches that this mask leaves: {size} (not measured){words}"


def _because(refusals: list[str]) -> str:
    return f" ({'; '.join(refusals)})" if refusals else ""
