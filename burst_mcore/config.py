"""BurstConfig: every choice of an attention call that is not the data, validated at construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from burst_mcore.handles import Named, introduce
from burst_mcore.layout import Layout

BACKWARDS = ("auto", "query", "kv")
RINGS = ("double", "flat", "direct", "auto")
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class BurstConfig(Named):
    """Raises ValueError where a field is not legal.

    Names of kernels, and degrees of head parallelism, are checked where the call is known.
    """

    layout: Layout | str = "zigzag"
    """How tokens are dealt over the ranks (`Layout`, or its word, such as "striped")."""

    backward: str = "auto"
    """What travels in backward: "query" (Q, dO, D, LSE and dQ: BurstAttention, paper algorithm 2),
    "kv" (K, V and dK, dV: RingAttention, paper algorithm 1), or "auto": whichever the cost model says."""

    ring: str = "auto"
    """The way of the bundles: "double" (around the node, and from node to node, both at once), "flat" (one
    ring over all ranks, which crosses nodes; on one node the same as "double"), "direct" (no ring: rows go
    from their owner straight to the ranks that read them), or "auto": whatever the cost model says."""

    overlap: bool = True
    """Communicate while computing. Without, every hop is waited for at once: for ablations."""

    head_parallel: int | str = 1
    """Ranks, neighbours, that share the heads between them, around a ring over the rest: 1 is the pure ring,
    as many as there are ranks is Ulysses, "auto" is whatever the cost model says."""

    kernel: str = "auto"
    """A name in the kernel table (`burst_mcore.attention.kernels.table`), or "auto"."""

    deterministic: bool = False
    """Gradients are bitwise equal between runs (on one device, with one number of threads): kernels that
    cannot promise that are not used."""

    grad_dtype: torch.dtype = torch.float32
    """dtype in which the travelling gradients are summed and sent. float64 inputs always use float64."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.layout))
        if self.backward not in BACKWARDS:
            raise ValueError(f"unknown backward {self.backward!r}; legal: {', '.join(map(repr, BACKWARDS))}")
        if self.ring not in RINGS:
            raise ValueError(f"unknown ring {self.ring!r}; legal: {', '.join(map(repr, RINGS))}")
        for name in ("overlap", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        degree = self.head_parallel
        if degree != "auto" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
            raise ValueError(
                f"head_parallel must be a number of ranks, at least 1, or 'auto', got {degree!r}"
            )
        if not isinstance(self.kernel, str):
            raise ValueError(f"kernel must be the name of a kernel or 'auto', got {self.kernel!r}")
        if self.grad_dtype not in GRAD_DTYPES:
            raise ValueError(f"grad_dtype must be one of {GRAD_DTYPES}, got {self.grad_dtype!r}")
        introduce(self, repr(self))
