"""The claims of the GPU check, as data. Predictions were made before any GPU ran a line of this project.

They follow from bytes and FLOPs, an H200's memory bandwidth, and the published speed of stock kernels. Each
part is a few minutes on an H200, so that a short loan of a machine is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from burst_bench.core import Bar, Case
from burst_bench.subjects.kernels import WRONG, KernelCase, MessagesCase, RowCase
from burst_bench.subjects.loss import HeadCase
from burst_bench.subjects.recompute import OffloadCase
from burst_bench.subjects.virtual_ring import VirtualCase
from burst_plan.machines import CONSTANTS


def claim(
    words: str,
    method: str,
    meter: str,
    predicted: float | None,
    bar: float | None = None,
    at_most: bool = False,
) -> Bar:
    """Return a bar for a figure on a GPU; with no bar the figure is recorded, and not judged."""
    return Bar(words, method, meter, bar, at_most, predicted=predicted)


@dataclass(frozen=True)
class Check:
    """A case of a subject, and the claims about it."""

    name: str
    case: Case
    claims: tuple[Bar, ...]

    @property
    def small(self) -> Case:
        """The case on a CPU, where only the code path is tried."""
        changes = {name: value for name, value in TINY.items() if hasattr(self.case, name)}
        return replace(self.case, **changes)


TINY: Mapping[str, Any] = {
    "tokens": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "value_dim": 0, "mask": "causal", "size": 4,
    "hidden": 16, "vocabulary": 96, "seq": 64, "layers": 2,
}  # fmt: skip
"""Values of a small case. A field that the case lacks is left out."""
OURS, BEST, STOCK = "triton", "speed / best other", "the best stock kernel"
Speeds = tuple[float, float]
"""Speeds of forward and of both passes, over the best stock kernel's."""
DIMS = {"64": (64, 64), "128": (128, 128), "192/128": (192, 128), "256": (256, 256)}


def _kernels_are_right() -> Iterator[Check]:
    for name, (dim, value_dim) in DIMS.items():
        case = KernelCase(tokens=2048, heads=8, kv_heads=2, head_dim=dim, value_dim=value_dim, passes="both")
        ours, bound, start = f"{OURS} at head dim {name}", WRONG["bfloat16"], "first call wall"
        claims = [
            claim(f"{ours}, relative error", OURS, "error", 0.005, bound, at_most=True),
            claim(f"{ours}, s to compile and check", OURS, start, 20.0),
        ]
        if dim == value_dim <= 128:
            claims.append(claim(f"cudnn at head dim {name}, s to plan and check", "cudnn", start, 2.0))
        yield Check(f"head dim {name}", case, tuple(claims))
    # Products without matrix units, at 4 multiply-adds a thread and step: bound by shared memory.
    case = KernelCase(tokens=2048, heads=8, kv_heads=2, dtype="float32", passes="both")
    error = claim(f"{OURS} in float32, relative error", OURS, "error", 1e-6, WRONG["float32"], at_most=True)
    yield Check("float32", case, (error,))


def _kernel(name: str, predicted: float | None, bar: float | None, **fields: Any) -> Check:
    speed = claim(f"{name}: ours over {STOCK}", OURS, BEST, predicted, bar)
    return Check(name, KernelCase(**fields), (speed,))


def _own_kernel() -> Iterator[Check]:
    yield _kernel("causal 16K, forward", 0.68, 0.68)
    yield _kernel("causal 16K, backward", 0.55, 0.55, passes="backward")
    for n in (2048, 8192, 32768):
        yield _kernel(f"causal {n}, both", 0.58, None, tokens=n, passes="both")
    yield _kernel("head dim 64, both", 0.55, None, head_dim=64, passes="both")
    yield _kernel("head dims 192/128, both", 0.5, None, head_dim=192, value_dim=128, heads=16, passes="both")
    documents = "causal & documents:" + ",".join(["1024"] * 15)
    yield _kernel("documents of 1K, both", 0.9, None, mask=documents, passes="both")
    yield _kernel("documents of 128, both", 1.2, 1.0, mask="causal & documents:random,128", passes="both")
    yield _kernel("window of 512, both", 0.8, None, mask="window:512", passes="both")
    yield _kernel("window of 4096, both", 0.6, None, mask="window:4096", passes="both")
    yield _kernel("3/4 of the blocks empty, both", 1.5, 1.0, mask="blocks:512,0.25", passes="both")
    yield _kernel("dilated by 4, both", 2.0, 1.0, mask="causal & dilated:4096,4", passes="both")


def _ring(words: str, predicted: Speeds, bars: Speeds | None, more: float = 0, **fields: Any) -> Check:
    """Return the claims of a ring; more: launches of a backward step by halves of the heads, on top of 6."""
    (forward, both), host = bars or (None, None), CONSTANTS.call
    claims = (
        claim(f"{words}: forward over {STOCK}", "burst", "forward kernel / this", predicted[0], forward),
        claim(f"{words}: both passes over {STOCK}", "burst", "kernel / this", predicted[1], both),
        claim(f"{words}: host, s a step forward", "burst", "host forward / step wall", host, host, True),
        claim(f"{words}: host, s a step backward", "burst", "host backward / step wall", host, host, True),
        claim(f"{words}: launches a step, forward", "burst", "launches / step of forward", 1.5),
        claim(f"{words}: launches a step, backward", "burst", "launches / step of backward", 6 + more),
    )
    return Check(words, VirtualCase(**fields), claims)


def _rings() -> Iterator[Check]:
    yield _ring("ring of 8, 32K a rank", (0.985, 0.98), (0.97, 0.96), 4.75)
    yield _ring("ring of 8, 32K a rank, keys rotate", (0.985, 0.98), None, direction="kv")
    yield _ring("ring of 8, 8K a rank", (0.96, 0.94), (0.95, 0.93), 4.75, tokens=8192)
    yield _ring("ring of 8, 8K a rank, keys rotate", (0.96, 0.93), None, tokens=8192, direction="kv")
    yield _ring("ring of 8, 4K a rank", (0.85, 0.85), None, tokens=4096)


def _more_rings() -> Iterator[Check]:
    yield _ring("GQA 32:8, 8K a rank", (0.96, 0.96), None, tokens=8192, kv_heads=8, direction="kv")
    yield _ring("head dim 64, 8K a rank", (0.94, 0.93), None, tokens=8192, head_dim=64)
    dims = {"head_dim": 192, "value_dim": 128, "heads": 16}
    yield _ring("head dims 192/128, 8K a rank", (0.95, 0.935), None, 4.75, tokens=8192, **dims)
    documents: Mapping[str, Any] = {"tokens": 8192, "mask": "causal & documents:random,64"}
    yield _ring("64 documents, 8K a rank", (0.9, 0.9), None, **documents)
    yield _ring("window of 4096, 8K a rank", (0.9, 0.9), None, tokens=8192, mask="window:4096")


def _other_ways() -> Iterator[Check]:
    """Yield claims of other rings. By the model, a latent's products take 6 % of a step."""
    dims: Mapping[str, Any] = {"head_dim": 192, "value_dim": 128, "heads": 16, "tokens": 8192}
    words = "ring of 8, 8K a rank, a latent rotates"
    speed = claim(f"{words}: both passes over {STOCK}", "burst", "kernel / this", 0.88)
    yield Check(words, VirtualCase(**dims, latent=True, direction="kv"), (speed,))


def _messages() -> Iterator[Check]:
    for ctas, slower in ((4, 1.01), (8, 1.02), (16, 1.05)):
        bar = 1.02 if ctas <= 8 else None
        claims = (
            claim(f"attention beside {ctas} CTAs", "under way", "this / alone", slower, bar, at_most=True),
            claim(f"messages by {ctas} CTAs, GB/s to itself", "messages", "GB/s", 40.0 * ctas),
        )
        yield Check(f"{ctas} CTAs", MessagesCase(ctas=ctas), claims)
    late = claim("attention beside messages of normal priority", "under way", "this / alone", 1.02)
    yield Check("normal priority", MessagesCase(priority=False), (late,))


def _passes() -> Iterator[Check]:
    """Yield claims of row passes: such passes reach about 85 % of an H200's 4.8 TB/s."""
    passes = ("D", "stand-in for O", "merge of 8", "sum of 8", "sum in float32")
    claims = tuple(claim(f"pass {name}, GB/s", name, "GB/s", 4000.0, 3000.0) for name in passes)
    yield Check("passes", RowCase(), claims)


def _loss() -> Iterator[Check]:
    case = HeadCase(tokens=16384, hidden=4096, vocabulary=128256, dtype="bfloat16")
    claims = (
        claim("loss over its three products", "burst", "wall / products", 1.12, 1.10, True),
        claim("loss over that of liger", "liger", "burst / this", 1.0, 1.0, True),
        claim("loss over that of cce", "cce", "burst / this", 1.0, 1.0, True),
        claim("loss over that of compiled naive", "compiled-naive", "burst / this", 0.9, 1.0, True),
    )  # fmt: skip
    yield Check("head of 128K words", case, claims)


def _offload() -> Iterator[Check]:
    """Yield claims of offload: 272 MB a layer leave at some 50 GB/s during 40 ms of forward."""
    claims = (
        claim("step of layers with offload, over one without", "offloaded", "this / kept", 1.01, 1.05, True),
        claim("bytes that left, over O and LSE", "offloaded", "left / (O and LSE)", 1.0, 0.99),
    )
    yield Check("4 layers of 32K tokens", OffloadCase(), claims)


SMOKE: tuple[Check, ...] = (
    *_kernels_are_right(),
    _ring("ring of 4, 2K a rank", (0.5, 0.5), None, size=4, tokens=2048, heads=8),
    next(_messages()),
)
PARTS: tuple[tuple[Check, ...], ...] = (
    tuple(_rings()),
    tuple(_own_kernel()),
    (*_messages(), *_passes(), *_more_rings(), *_other_ways()),
    (*_loss(), *_offload()),
)
"""The figures, part by part, the most informative first."""
