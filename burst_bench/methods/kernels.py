"""Local attention kernels: a method for every kernel in the table, and the square that they attend over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from burst_bench.core import Case, Method, World, add, one_of
from burst_bench.methods.bare import Tiles
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import Kernel, Problem
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_plan.explain.problem import DTYPES
from burst_plan.words import mask_of


@dataclass(frozen=True, kw_only=True)
class SquareCase(Case):
    """Attention of one device: a square of queries and keys."""

    devices = ("cpu", "cuda")
    repeats = 5

    tokens: int = 16384
    heads: int = 32
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 128
    value_dim: int = 0
    """0: as wide as keys."""
    dtype: str = one_of("bfloat16", DTYPES)
    mask: str = "causal"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.seen  # a ValueError if there is no such mask

    @property
    def seen(self) -> Mask:
        """The mask over all tokens."""
        return mask_of(self.mask, self.tokens)

    @property
    def dims(self) -> tuple[int, int]:
        """Widths of keys and values."""
        return self.head_dim, self.value_dim or self.head_dim

    def problem(self, device: str) -> Problem:
        """Return the problem that a kernel must support."""
        return Problem(device, DTYPES[self.dtype], self.heads, self.kv_heads or self.heads, *self.dims)

    def flops(self, pairs: float) -> float:
        """Return the FLOPs of a forward of so many query-key pairs."""
        return 2 * self.heads * sum(self.dims) * pairs

    def tensors(self, device: str) -> list[Tensor]:
        """q, k, v and dout [1, tokens, heads, head dim]; the same every time."""
        generator, (dim, value_dim) = torch.Generator(device).manual_seed(0), self.dims
        kv_heads = self.kv_heads or self.heads
        shapes = (self.heads, dim), (kv_heads, dim), (kv_heads, value_dim), (self.heads, value_dim)
        return [
            torch.randn((1, self.tokens, *shape), device=device, generator=generator).to(DTYPES[self.dtype])
            for shape in shapes
        ]

    def bare(self, kernel: Kernel, tensors: Sequence[Tensor]) -> Tiles:
        """Return the calls that a kernel needs."""
        plan = plan_for(Layout("contiguous"), self.seen, self.tokens, 1)
        return Tiles(kernel, tiles_of(plan, 0, 0, kernel.abilities), tensors)


def others(case: SquareCase, device: str) -> list[str]:
    """Kernels that are not ours, and can serve."""
    names = [name for name in KERNELS if name not in ("reference", "triton")]
    return [name for name in names if _needs(name, case, device) is None]


def _kernel(name: str, case: SquareCase, world: World) -> Kernel:
    return KERNELS[name]


def _needs(name: str, case: SquareCase, device: str) -> str | None:
    return KERNELS[name].supports(case.problem(device))


add(
    "kernels",
    *(
        Method(name, partial(_kernel, name), partial(_needs, name), ours=name == "triton")
        for name in KERNELS
        if name != "reference"
    ),
)
