"""Local attention kernels: a method for each in the table, their square of pairs, and bare calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from burst_bench.core import Case, Method, TimedStep, World, add, one_of
from burst_mcore import Layout, Mask
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.rows import gather
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Problem, Scores
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.dtypes import wide
from burst_plan.explain.problem import DTYPES
from burst_plan.words import mask_of


def scores_of(q: Tensor) -> Scores:
    """Return the default options of a tile: the scale of its head dim."""
    return Scores(q.shape[-1] ** -0.5)


def both_ways(
    kernel: Kernel, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return (out, lse, dq, dk, dv) of one call per pass; without dout (out, lse) of a forward alone."""
    out, lse = kernel.forward(q, k, v, pattern, scores_of(q))
    if dout is None:
        return out, lse
    return out, lse, *kernel.backward(_inputs(kernel, q, k, v, dout, out, lse), pattern, scores_of(q))


class Tiles:
    """The calls of a kernel for the tiles of q, k, v and dout."""

    def __init__(self, kernel: Kernel, tiles: Sequence[Tile], tensors: Sequence[Tensor]) -> None:
        self.kernel, self.tiles, self.tensors = kernel, tiles, tensors

    def rows(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, dout = self.tensors
        return gather(q, tile.q), gather(k, tile.k), gather(v, tile.k), gather(dout, tile.q)

    def forward(self) -> None:
        for tile in self.tiles:
            both_ways(self.kernel, tile.pattern, *self.rows(tile)[:3])

    def both(self) -> None:
        """Call both passes, tile by tile."""
        for tile in self.tiles:
            both_ways(self.kernel, tile.pattern, *self.rows(tile))

    def backward(self) -> TimedStep:
        """Run the forward, and return the backward as a step."""
        inputs = []
        for tile in self.tiles:
            q, k, v, dout = self.rows(tile)
            inputs.append(_inputs(self.kernel, q, k, v, dout, *both_ways(self.kernel, tile.pattern, q, k, v)))

        def step() -> None:
            for tile, of_tile in zip(self.tiles, inputs, strict=True):
                self.kernel.backward(of_tile, tile.pattern, scores_of(of_tile.q))

        return step


def _inputs(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor
) -> BackwardInputs:
    lse = lse.to(wide(q.dtype))
    delta = row_delta(dout, out) if kernel.takes_delta else lse  # the others compute it from out
    return BackwardInputs(dout, q, k, v, out, lse, delta)


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
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        assert self.seen  # a ValueError if there is no such mask

    @property
    def seen(self) -> Mask:
        return mask_of(self.mask, self.tokens)

    @property
    def dims(self) -> tuple[int, int]:
        """Widths of keys and values."""
        return self.head_dim, self.value_dim or self.head_dim

    def flops(self, pairs: float) -> float:
        """Return the FLOPs of a forward of so many query-key pairs."""
        return 2 * self.heads * sum(self.dims) * pairs

    def tensors(self, device: str) -> list[Tensor]:
        """Return q, k, v and dout [1, tokens, heads, head dim]; the same every time."""
        generator, (dim, value_dim) = torch.Generator(device).manual_seed(0), self.dims
        heads, kv_heads = self.heads, self.kv_heads
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
        return [
            torch.randn((1, self.tokens, *shape), device=device, generator=generator).to(DTYPES[self.dtype])
            for shape in shapes
        ]

    def bare(self, kernel: Kernel, tensors: Sequence[Tensor]) -> Tiles:
        """Return the calls that a kernel needs."""
        plan = plan_of(Layout("contiguous"), self.seen, self.tokens, Placement(1))
        return Tiles(kernel, tiles_of(plan, 0, 0, kernel.abilities), tensors)


def others(case: SquareCase, device: str) -> list[str]:
    """Return the names of other projects' kernels that support a case."""
    names = [name for name in KERNELS if name not in ("reference", "triton")]
    return [name for name in names if _needs(name, case, device) is None]


def _kernel(name: str, case: SquareCase, world: World) -> Kernel:
    return KERNELS[name]


def _needs(name: str, case: SquareCase, device: str) -> str | None:
    problem = Problem(device, DTYPES[case.dtype], case.heads, case.kv_heads, *case.dims)
    return KERNELS[name].supports(problem)


for each in [name for name in KERNELS if name != "reference"]:
    add("kernels", Method(each, partial(_kernel, each), partial(_needs, each), ours=each == "triton"))
