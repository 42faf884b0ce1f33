"""Local attention kernels on one device: ours in Triton beside the best of the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.geometry.rows import gather
from burst_mcore.attention.geometry.tiles import Tile, tiles_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.bench.core import (
    Bar,
    Case,
    Derived,
    Method,
    Stage,
    Subject,
    Table,
    Trial,
    World,
    column,
    over,
)
from burst_mcore.bench.gate import relative
from burst_mcore.explain.problem import DTYPES
from burst_mcore.layout import Layout
from burst_mcore.layout.balance import keys_per_query
from burst_mcore.mask import Mask
from burst_mcore.mask.words import mask_of, shortened

GATE_TOKENS = 256
WRONG = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}
"""A kernel whose relative error beside float64 is larger is wrong."""
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of the passes, in those of a forward."""
OURS = "triton"
BAR = {"forward": 0.68, "backward": 0.55, "both": 1.0}
"""Speed of ours over that of the best other kernel, at least; both: with 3/4 of the blocks empty."""


@dataclass(frozen=True, kw_only=True)
class KernelCase(Case):
    """One pass of a kernel, or both, on a square of queries and keys."""

    tokens: int = 16384
    heads: int = 32
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 128
    value_dim: int = 0
    """0: as wide as keys."""
    dtype: str = "bfloat16"
    mask: str = "causal"
    passes: str = "forward"
    """forward, backward or both."""

    def __post_init__(self) -> None:
        if self.passes not in WORK:
            raise ValueError(f"passes must be one of {', '.join(WORK)}, got {self.passes!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        mask_of(self.mask, self.tokens)

    @property
    def seen(self) -> Mask:
        """The mask over all tokens."""
        return mask_of(self.mask, self.tokens)

    def tensors(self, device: str) -> list[Tensor]:
        """q, k, v and dout [1, tokens, heads, head dim]; the same every time."""
        generator, dtype = torch.Generator(device).manual_seed(0), DTYPES[self.dtype]
        kv_heads, value_dim = self.kv_heads or self.heads, self.value_dim or self.head_dim
        shapes = (
            (self.heads, self.head_dim), (kv_heads, self.head_dim), (kv_heads, value_dim),
            (self.heads, value_dim),
        )  # fmt: skip
        return [
            torch.randn((1, self.tokens, *shape), device=device, generator=generator).to(dtype)
            for shape in shapes
        ]


Given = tuple[Tile, Tensor, Tensor, BackwardInputs]
"""A tile, the output of its forward, and the inputs of its backward."""


class Tiles:
    """The calls that a kernel needs for a case."""

    def __init__(self, kernel: Kernel, case: KernelCase, tensors: Sequence[Tensor]) -> None:
        self.kernel, self.scores, self.tensors = kernel, Scores(case.head_dim**-0.5), tensors
        planned = plan_for(Layout("contiguous"), case.seen, case.tokens, 1)
        self.tiles = tiles_of(planned, 0, 0, kernel.abilities)

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """Return (out, lse) of every tile."""
        return [self.kernel.forward(*self._rows(t), t.pattern, self.scores) for t in self.tiles]

    def backward(self, inputs: Sequence[BackwardInputs]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (dq, dk, dv) of every tile."""
        return [
            self.kernel.backward(x, t.pattern, self.scores) for x, t in zip(inputs, self.tiles, strict=True)
        ]

    def inputs(self, outputs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[BackwardInputs]:
        """Return the inputs of the backward, tile by tile."""
        for tile, (out, lse) in zip(self.tiles, outputs, strict=True):
            dout = gather(self.tensors[3], tile.q)
            yield BackwardInputs(dout, *self._rows(tile), out, lse, row_delta(dout, out))

    def both(self) -> None:
        """Forward and backward, tile by tile."""
        self.backward(list(self.inputs(self.forward())))

    def _rows(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _ = self.tensors
        return gather(q, tile.q), gather(k, tile.k), gather(v, tile.k)


def _stage(case: KernelCase, world: World) -> Stage:
    tensors = case.tensors(world.device)

    def trial(method: Method) -> Trial:
        calls = Tiles(method.build(case, world), case, tensors)
        inputs = list(calls.inputs(calls.forward())) if case.passes == "backward" else []
        steps = {"forward": calls.forward, "backward": lambda: calls.backward(inputs), "both": calls.both}

        start = time.perf_counter()
        check = _error(calls.kernel, case, world.device)
        found = {"error": check, "first call wall": time.perf_counter() - start}
        return Trial(
            {"": steps[case.passes]},
            check=lambda: found,
            bound=WRONG[case.dtype],
            ahead=case.passes != "both",
        )

    return Stage(trial)


def _error(kernel: Kernel, case: KernelCase, device: str) -> float:
    """Return the worst relative error over few tokens, beside the reference kernel in float64."""
    n = min(case.tokens, GATE_TOKENS)
    short = replace(case, tokens=n, mask=shortened(case.mask, case.tokens, n))
    tensors = short.tensors(device)
    calls = Tiles(kernel, short, tensors)
    exact = Tiles(KERNELS["reference"], short, [x.double() for x in tensors])
    exact.tiles = calls.tiles
    worst = 0.0
    outputs = calls.forward(), exact.forward()
    inputs = [list(each.inputs(out)) for each, out in zip((calls, exact), outputs, strict=True)]
    gradients = calls.backward(inputs[0]), exact.backward(inputs[1])
    for got, want in (*zip(*outputs, strict=True), *zip(*gradients, strict=True)):
        worst = max(worst, *(relative(a, b) for a, b in zip(got, want, strict=True)))
    return worst


def _derive(case: KernelCase, table: Table) -> Derived:
    """TFLOP/s of each, and the speed of ours over the best other's."""
    walls = column(table, "wall")
    dims = case.head_dim + (case.value_dim or case.head_dim)
    pairs = int(keys_per_query(case.seen, case.tokens).sum())
    flops = WORK[case.passes] * 2 * case.heads * dims * pairs
    for method, samples in walls.items():
        yield method, "TFLOP/s", [flops / seconds / 1e12 for seconds in samples]
    others = [method for method in walls if method != OURS]
    if OURS in walls and others:
        best = min(others, key=lambda method: statistics.median(walls[method]))
        yield OURS, "speed / best other", over(table, (best, "wall"), (OURS, "wall"))


def _cases(device: str) -> Mapping[str, KernelCase]:
    blocks = f"blocks:{KernelCase().tokens // 32},0.25"
    return {
        "causal 16384, forward": KernelCase(),
        "causal 16384, backward": KernelCase(passes="backward"),
        "3/4 of the blocks empty, both ways": KernelCase(mask=blocks, passes="both"),
    }


def _bars(name: str, case: KernelCase | None, device: str) -> Sequence[Bar]:
    if case is None or (case.mask == "causal") == (case.passes == "both"):
        return ()
    return [
        Bar("triton over the best other kernel", OURS, "speed / best other", BAR[case.passes], at_most=False)
    ]


SUBJECT = Subject(
    name="kernels",
    about="Local attention kernels on one device, in turn; bars are for an H200.",
    case=KernelCase,
    cases=_cases,
    stage=_stage,
    kind="kernels",
    devices=("cpu", "cuda"),
    repeats=5,
    derive=_derive,
    bars=_bars,
)
