"""The table of local kernels, and the choice of one for a call."""

from __future__ import annotations

import logging
from functools import lru_cache

from burst_mcore.attention.kernels import aten, reference
from burst_mcore.attention.kernels.kernel import Kernel, Problem

logger = logging.getLogger("burst_mcore")

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*aten.KERNELS, reference.KERNEL)}
"""All kernels by name, in the order in which "auto" tries them."""


@lru_cache(maxsize=1024)
def choose(name: str, problem: Problem) -> Kernel:
    """The kernel called `name`, or the first in the table that serves if name is "auto".

    The choice is logged once for each problem; where "auto" ends at the reference kernel, which is slow and
    stores all scores, it is logged as a warning with the reasons of the others.

    Raises:
        ValueError: unknown name, or the kernel cannot serve the problem (with its reason).
    """
    if name != "auto":
        if name not in KERNELS:
            raise ValueError(f"unknown kernel {name!r}; legal: 'auto', {', '.join(map(repr, KERNELS))}")
        reason = KERNELS[name].supports(problem)
        if reason is not None:
            raise ValueError(f"kernel {name!r} cannot serve this call: {reason}")
        logger.info("kernel %s for %s, as asked", name, problem)
        return KERNELS[name]
    refusals: list[str] = []
    for kernel in KERNELS.values():
        reason = kernel.supports(problem)
        if reason is None:
            level = logging.WARNING if kernel.name == "reference" else logging.INFO
            logger.log(level, "kernel %s for %s%s", kernel.name, problem, _because(refusals))
            return kernel
        refusals.append(f"{kernel.name}: {reason}")
    raise ValueError(f"no kernel serves this call{_because(refusals)}")


def _because(refusals: list[str]) -> str:
    return f" ({'; '.join(refusals)})" if refusals else ""
