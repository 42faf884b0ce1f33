"""The claims of the GPU check, as data. Predictions were made before any GPU ran a line of this project.

They follow from bytes and FLOPs, an H200's memory bandwidth, and the published speed of stock kernels. Each
part is a few minutes on an H200, so that a short loan of a machine is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from burst_bench.core import Bar, Case
from burst_bench.subjects.kernels import PASS_BYTES, WRONG, KernelCase, MessagesCase, RowCase
from burst_bench.subjects.loss import HeadCase
from burst_bench.subjects.recompute import OffloadCase
from burst_bench.subjects.virtual_ring import VirtualCase
from burst_plan.machines import CONSTANTS

at_least = partial(Bar, at_most=False)


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
OURS, BEST, RING = "triton", "speed / best other", "kernel / this"
STOCK = "the best stock kernel"
Speeds = tuple[float, float]
"""Speeds of forward and of both passes, over the best stock kernel's."""
DIMS = {"64": (64, 64), "128": (128, 128), "192/128": (192, 128), "256": (256, 256)}


def _kernels_are_right() -> Iterator[Check]:
    for name, (dim, value_dim) in DIMS.items():
        case = KernelCase(tokens=2048, heads=8, kv_heads=2, head_dim=dim, value_dim=value_dim, passes="both")
        ours, bound, start = f"{OURS} at head dim {name}", WRONG["bfloat16"], "first call wall"
        claims = [
            Bar(f"{ours}, relative error", OURS, "error", bound, predicted=0.005),
            Bar(f"{ours}, s to compile and check", OURS, start, predicted=20.0),
        ]
        if dim == value_dim <= 128:
            claims.append(
                Bar(f"cudnn at head dim {name}, s to plan and check", "cudnn", start, predicted=2.0)
            )
        yield Check(f"head dim {name}", case, tuple(claims))
    # Products without matrix units, at 4 multiply-adds a thread and step: bound by shared memory.
    case = KernelCase(tokens=2048, heads=8, kv_heads=2, dtype="float32", passes="both")
    error = Bar(f"{OURS} in float32, relative error", OURS, "error", WRONG["float32"], predicted=1e-6)
    yield Check("float32", case, (error,))


def _kernel(name: str, predicted: float | None, bar: float | None, **fields: Any) -> Check:
    speed = at_least(f"{name}: ours over {STOCK}", OURS, BEST, bar, predicted=predicted)
    return Check(name, KernelCase(**fields), (speed,))


LATENT: Mapping[str, Any] = {"head_dim": 192, "value_dim": 128, "heads": 16}
"""A head of multi-latent attention."""
DOCUMENTS = "causal & documents:" + ",".join(["1024"] * 15)
OWN_KERNEL = (
    _kernel("causal 16K, forward", 0.68, 0.68),
    _kernel("causal 16K, backward", 0.55, 0.55, passes="backward"),
    *(_kernel(f"causal {n}, both", 0.58, None, tokens=n, passes="both") for n in (2048, 8192, 32768)),
    _kernel("head dim 64, both", 0.55, None, head_dim=64, passes="both"),
    _kernel("head dims 192/128, both", 0.5, None, **LATENT, passes="both"),
    _kernel("documents of 1K, both", 0.9, None, mask=DOCUMENTS, passes="both"),
    _kernel("documents of 128, both", 1.2, 1.0, mask="causal & documents:random,128", passes="both"),
    _kernel("window of 512, both", 0.8, None, mask="window:512", passes="both"),
    _kernel("window of 4096, both", 0.6, None, mask="window:4096", passes="both"),
    _kernel("3/4 of the blocks empty, both", 1.5, 1.0, mask="blocks:512,0.25", passes="both"),
    _kernel("dilated by 4, both", 2.0, 1.0, mask="causal & dilated:4096,4", passes="both"),
)


def _ring(words: str, predicted: Speeds, bars: Speeds | None, more: float = 0, **fields: Any) -> Check:
    """Return the claims of a ring; more: launches of a backward step by halves of the heads, on top of 6."""
    (forward, both), host = bars or (None, None), CONSTANTS.call
    claims = (
        at_least(
            f"{words}: forward over {STOCK}", "burst", f"forward {RING}", forward, predicted=predicted[0]
        ),
        at_least(f"{words}: both passes over {STOCK}", "burst", RING, both, predicted=predicted[1]),
        Bar(f"{words}: host, s a step forward", "burst", "host forward / step wall", host, predicted=host),
        Bar(f"{words}: host, s a step backward", "burst", "host backward / step wall", host, predicted=host),
        Bar(f"{words}: launches a step, forward", "burst", "launches / step of forward", predicted=1.5),
        Bar(
            f"{words}: launches a step, backward", "burst", "launches / step of backward", predicted=6 + more
        ),
    )
    return Check(words, VirtualCase(**fields), claims)


RINGS = (
    _ring("ring of 8, 32K a rank", (0.985, 0.98), (0.97, 0.96), 4.75),
    _ring("ring of 8, 32K a rank, keys rotate", (0.985, 0.98), None, direction="kv"),
    _ring("ring of 8, 8K a rank", (0.96, 0.94), (0.95, 0.93), 4.75, tokens=8192),
    _ring("ring of 8, 8K a rank, keys rotate", (0.96, 0.93), None, tokens=8192, direction="kv"),
    _ring("ring of 8, 4K a rank", (0.85, 0.85), None, tokens=4096),
)
ROTATING_LATENT = "ring of 8, 8K a rank, a latent rotates"
MORE_RINGS = (
    _ring("GQA 32:8, 8K a rank", (0.96, 0.96), None, tokens=8192, kv_heads=8, direction="kv"),
    _ring("head dim 64, 8K a rank", (0.94, 0.93), None, tokens=8192, head_dim=64),
    _ring("head dims 192/128, 8K a rank", (0.95, 0.935), None, 4.75, tokens=8192, **LATENT),
    _ring("64 documents, 8K a rank", (0.9, 0.9), None, tokens=8192, mask="causal & documents:random,64"),
    _ring("window of 4096, 8K a rank", (0.9, 0.9), None, tokens=8192, mask="window:4096"),
    Check(
        ROTATING_LATENT,
        VirtualCase(**LATENT, tokens=8192, latent=True, direction="kv"),
        (Bar(f"{ROTATING_LATENT}: both passes over {STOCK}", "burst", RING, at_most=False, predicted=0.88),),
    ),
)
"""The last by the model: a latent's products take 6 % of a step."""


def _messages(ctas: int, slower: float, bar: float | None) -> Check:
    claims = (
        Bar(f"attention beside {ctas} CTAs", "under way", "this / alone", bar, predicted=slower),
        Bar(f"messages by {ctas} CTAs, GB/s to itself", "messages", "GB/s", predicted=40.0 * ctas),
    )
    return Check(f"{ctas} CTAs", MessagesCase(ctas=ctas), claims)


NORMAL = Bar("attention beside messages of normal priority", "under way", "this / alone", predicted=1.02)
MESSAGES = (
    *(_messages(4, 1.01, 1.02), _messages(8, 1.02, 1.02), _messages(16, 1.05, None)),
    Check("normal priority", MessagesCase(priority=False), (NORMAL,)),
)
PASSES = tuple(at_least(f"pass {name}, GB/s", name, "GB/s", 3000.0, predicted=4000.0) for name in PASS_BYTES)
"""Passes over rows reach about 85 % of an H200's 4.8 TB/s."""
LOSS = (
    Bar("loss over its three products", "burst", "wall / products", 1.10, predicted=1.12),
    Bar("loss over that of liger", "liger", "burst / this", 1.0, predicted=1.0),
    Bar("loss over that of cce", "cce", "burst / this", 1.0, predicted=1.0),
    Bar("loss over that of compiled naive", "compiled-naive", "burst / this", 1.0, predicted=0.9),
)
HEAD = HeadCase(tokens=16384, hidden=4096, vocabulary=128256, dtype="bfloat16")
OFFLOAD = (
    Bar("step of layers with offload, over one without", "offloaded", "this / kept", 1.05, predicted=1.01),
    at_least("bytes that left, over O and LSE", "offloaded", "left / (O and LSE)", 0.99, predicted=1.0),
)
"""272 MB a layer leave at some 50 GB/s during 40 ms of forward."""
SMOKE: tuple[Check, ...] = (
    *_kernels_are_right(),
    _ring("ring of 4, 2K a rank", (0.5, 0.5), None, size=4, tokens=2048, heads=8),
    MESSAGES[0],
)
PARTS: tuple[tuple[Check, ...], ...] = (
    RINGS,
    OWN_KERNEL,
    (*MESSAGES, Check("passes", RowCase(), PASSES), *MORE_RINGS),
    (Check("head of 128K words", HEAD, LOSS), Check("4 layers of 32K tokens", OffloadCase(), OFFLOAD)),
)
"""The figures, part by part, the most informative first."""
