"""The table of fused losses, and the choice of one for a call: ours, unless another is asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from burst_mcore.loss.chunked import forward
from burst_mcore.loss.libraries import CCE, LIGER, TORCH, Kernel, Problem

logger = logging.getLogger("burst_mcore")

KERNELS = {
    "burst": Kernel(lambda problem: None, forward),
    "torch": TORCH,
    "liger": LIGER,
    "cce": CCE,
}
"""All by name; `burst-mcore bench loss` measures them under the same names."""

AUTO = ("burst",)
"""What "auto" tries, in this order. A library's comes in when it was measured to be faster and as exact: on
CPU none was, on a GPU nothing was measured."""

_asked: ContextVar[str] = ContextVar("burst_mcore_loss_kernel", default="auto")


@contextmanager
def loss_kernel(name: str) -> Iterator[None]:
    """Within it, `fused_linear_cross_entropy` and all that is built on it use the kernel of this name.

    Args:
        name: "auto" (what is used anyway), "burst" (ours), "torch" (torch's `linear_cross_entropy`, from 2.13
            on), "liger" or "cce" (on CUDA, where the packages are installed).

    Raises:
        ValueError: the name is unknown. Calls within it raise one where the kernel cannot serve them, with
            the reason; there is no fallback.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"unknown loss kernel {name!r}; legal: 'auto', {', '.join(map(repr, KERNELS))}")
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> str:
    """The name that `loss_kernel` was given here, or "auto"."""
    return _asked.get()


@lru_cache(maxsize=1024)
def choose(name: str, problem: Problem) -> Kernel:
    """The kernel of this name, or, if that is "auto", the first of AUTO that serves; logged once a problem.

    Raises:
        ValueError: it cannot serve the problem, with the reason.
    """
    refusals = []
    for candidate in AUTO if name == "auto" else (name,):
        reason = KERNELS[candidate].supports(problem)
        if reason is None:
            logger.info("loss kernel %s for %s", candidate, problem)
            return KERNELS[candidate]
        refusals.append(f"loss kernel {candidate!r} cannot serve this call: {reason}")
    raise ValueError("; ".join(refusals))
