"""BurstConfig: every choice of an attention call that is not the data, validated at construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from burst_mcore.layout import Layout

BACKWARDS = ("auto", "query", "kv")
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class BurstConfig:
    """Raises ValueError where a field is not legal; kernel names are checked where the kernel is chosen."""

    layout: Layout | str = "zigzag"
    """How tokens are dealt over the ranks (`Layout`, or the name of its kind)."""

    backward: str = "auto"
    """What travels in backward: "query" (Q, dO, D, LSE and dQ: BurstAttention, paper algorithm 2),
    "kv" (K, V and dK, dV: RingAttention, paper algorithm 1), or "auto": whichever moves fewer bytes."""

    kernel: str = "auto"
    """A name in the kernel table (`burst_mcore.attention.kernels.table`), or "auto"."""

    grad_dtype: torch.dtype = torch.float32
    """dtype in which the travelling gradients are summed and sent. float64 inputs always use float64."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.layout))
        if self.backward not in BACKWARDS:
            raise ValueError(f"unknown backward {self.backward!r}; legal: {', '.join(map(repr, BACKWARDS))}")
        if not isinstance(self.kernel, str):
            raise ValueError(f"kernel must be the name of a kernel or 'auto', got {self.kernel!r}")
        if self.grad_dtype not in GRAD_DTYPES:
            raise ValueError(f"grad_dtype must be one of {GRAD_DTYPES}, got {self.grad_dtype!r}")
