"""Local attention kernels: a method for every kernel in the table."""

from __future__ import annotations

from functools import partial
from typing import Any

from burst_mcore.attention.kernels.kernel import Kernel, Problem
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.bench.core import Method, World
from burst_mcore.explain.problem import DTYPES


def _kernel(name: str, case: Any, world: World) -> Kernel:
    return KERNELS[name]


def problem_of(case: Any, device: str) -> Problem:
    """Return the problem that a kernel must support for a case."""
    heads, dims = (case.heads, case.kv_heads or case.heads), (case.head_dim, case.value_dim or case.head_dim)
    return Problem(device, DTYPES[case.dtype], *heads, *dims)


def _needs(name: str, case: Any, device: str) -> str | None:
    return KERNELS[name].supports(problem_of(case, device))


def others(case: Any, device: str) -> list[str]:
    """Kernels that are not ours, and can serve."""
    names = [name for name in KERNELS if name not in ("reference", "triton")]
    return [name for name in names if _needs(name, case, device) is None]


METHODS = tuple(
    Method(name, partial(_kernel, name), partial(_needs, name), ours=name == "triton")
    for name in KERNELS
    if name != "reference"
)
