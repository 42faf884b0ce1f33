"""One rank's share of a ring on one device: beside its kernel alone, and beside itself without copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.core import (
    Bar,
    Case,
    Derived,
    Method,
    Stage,
    Step,
    Subject,
    Table,
    Trial,
    World,
    column,
)
from burst_mcore.bench.methods.kernels import others
from burst_mcore.bench.methods.virtual_rank import FROM, VirtualRank
from burst_mcore.bench.subjects.kernels import KernelCase, Tiles
from burst_mcore.explain.problem import DTYPES
from burst_mcore.mask.words import mask_of, shortened

TOKENS = 32768
"""Local tokens of a ring of 8, for which its bars are meant."""
TFLOPS = 575
"""That a ring's backward should reach where its kernel alone does, on an H200."""
FULL = "backward of a kernel that reaches TFLOP/s"
"""The meter of backwards whose kernel alone reaches as much."""
CHOOSING_TOKENS = 8192
"""Of the square on which kernels are compared, where the fastest is asked for."""


@dataclass(frozen=True, kw_only=True)
class VirtualCase(Case):
    """A rank in the middle of a ring, its local tokens, and where its bundles come from."""

    size: int = 8
    """Ranks of the ring, of which one is there."""
    tokens: int = TOKENS
    source: str = "device"
    """device, host or nowhere."""
    direction: str = "query"
    heads: int = 32
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 128
    value_dim: int = 0
    """0: as wide as keys."""
    mask: str = "causal"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.source not in FROM:
            raise ValueError(f"source must be one of {', '.join(FROM)}, got {self.source!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def _fastest(case: VirtualCase, world: World) -> str:
    """Return the kernel of others that is the fastest both ways here, on a small causal square."""
    n = min(case.tokens, CHOOSING_TOKENS)
    square = KernelCase(
        tokens=n, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, value_dim=case.value_dim,
        dtype=case.dtype, mask=shortened(case.mask, case.tokens * case.size, n), passes="both",
    )  # fmt: skip
    tensors = square.tensors(world.device)
    names = others(case, world.device)
    if not names:
        raise LookupError("no kernel of others is here")
    return min(names, key=lambda name: _seconds(Tiles(KERNELS[name], square, tensors), world))


def _seconds(calls: Tiles, world: World) -> float:
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        calls.both()
        if world.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _build(case: VirtualCase, world: World) -> None:
    """Do nothing: the stage makes the rank, which its units share."""


def _methods(case: VirtualCase) -> Mapping[str, Method]:
    return {"burst": Method("burst", _build)}


def _stage(case: VirtualCase, world: World) -> Stage:
    """Passes of a rank, and of what they are measured beside, all of the same kernel.

    The idle rank's kernel does nothing: its passes are all that is not the kernel's. There the host is ahead
    of the device, as where kernels take their time.
    """
    kernel = _fastest(case, world)
    shape = Shard(
        batch=1,
        tokens=case.tokens,
        heads=case.heads,
        kv_heads=case.kv_heads or case.heads,
        head_dim=case.head_dim,
        value_dim=case.value_dim or case.head_dim,
        dtype=DTYPES[case.dtype],
    )
    options: dict[str, Any] = {
        "mask": mask_of(case.mask, case.tokens * case.size), "direction": case.direction, "kernel": kernel,
        "device": world.device,
    }  # fmt: skip
    rank, quiet = (VirtualRank(shape, case.size, source=s, **options) for s in (case.source, "nowhere"))
    idle = VirtualRank(shape, case.size, source="nowhere", works=False, **options)
    done = rank.forward()
    queries = rank.queries(done)
    bare_backward = partial(rank.bare_backward, queries, done.out)
    units = {
        "kernel alone": _both(rank.bare_forward, bare_backward),
        "without copies": _both(quiet.forward, partial(quiet.backward, done)),
        "around the kernels": _both(idle.forward, partial(idle.backward, done), ahead=True),
    }
    ring = _both(rank.forward, partial(rank.backward, done))
    host = [_host_seconds(idle.forward), _host_seconds(partial(idle.backward, done))]
    facts = {
        ("kernel alone", "pairs"): float(rank.pairs),
        ("burst", "host forward / step wall"): host[0] / case.size,
        ("burst", "host backward / step wall"): host[1] / case.size,
        ("burst", "launches / step of forward"): _launches(rank.forward, world) / case.size,
        ("burst", "launches / step of backward"): _launches(partial(rank.backward, done), world) / case.size,
    }
    return Stage(lambda method: ring, units, facts=facts)


def _launches(step: Step, world: World) -> int:
    """Return how many kernels a GPU runs in a pass; on a CPU, how many operators are called."""
    cuda = world.device == "cuda"
    kinds = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=kinds) as seen:
        step()
        if cuda:
            torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if cuda or event.key.startswith("aten::"))


def _host_seconds(step: Step) -> float:
    """Return the least seconds that the host takes to start a pass, of several; nothing is waited for."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _both(forward: Step, backward: Step, ahead: bool = False) -> Trial:
    return Trial({"forward": forward, "backward": backward}, ahead=ahead)


def _derive(case: VirtualCase, table: Table) -> Derived:
    forward, backward = column(table, "forward wall"), column(table, "backward wall")
    whole = {name: [a + b for a, b in zip(forward[name], backward[name], strict=True)] for name in forward}
    for meter, seconds, one, other in (
        ("forward kernel / this", forward, "kernel alone", "burst"),
        ("kernel / this", whole, "kernel alone", "burst"),
        ("copies / without", whole, "burst", "without copies"),
        ("around kernels / whole", whole, "around the kernels", "without copies"),
    ):
        yield "burst", meter, [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
    dims = case.head_dim + (case.value_dim or case.head_dim)
    flops = 2.5 * 2 * case.heads * dims * table["kernel alone", "pairs"][0]
    rates = {name: [flops / s / 1e12 for s in backward[name]] for name in ("burst", "kernel alone")}
    for name, samples in rates.items():
        yield name, "backward TFLOP/s", samples
    if statistics.median(rates["kernel alone"]) >= TFLOPS:
        yield "burst", FULL, rates["burst"]


def _rings() -> Iterator[VirtualCase]:
    """Fewer tokens where there are many ranks, to end in time."""
    for size, fewer in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 2), (64, 4)):
        yield VirtualCase(size=size, tokens=TOKENS // fewer)
    for source, direction in (("device", "kv"), ("host", "query"), ("host", "kv")):
        yield VirtualCase(source=source, direction=direction)
    yield VirtualCase(size=64, tokens=TOKENS // 4, source="host")


def _cases(device: str) -> Mapping[str, VirtualCase]:
    return {f"ring of {c.size}, {c.tokens} local tokens, from {c.source}, {c.direction}": c for c in _rings()}


def _bars(name: str, case: VirtualCase | None, device: str) -> Sequence[Bar]:
    if case is None or (case.size, case.source) != (8, "device") or case.tokens < TOKENS:
        return ()
    return [
        Bar("forward, of the kernel's speed", "burst", "forward kernel / this", 0.97, at_most=False),
        Bar("both, of the kernel's speed", "burst", "kernel / this", 0.96, at_most=False),
        Bar("with copies over without", "burst", "copies / without", 1.03),
        Bar("share of the time around the kernels", "burst", "around kernels / whole", 0.02),
        Bar(
            "backward, where the kernel reaches as much",
            "burst",
            FULL,
            TFLOPS,
            at_most=False,
        ),
    ]


SUBJECT = Subject(
    name="virtual-ring",
    about="One rank's share of a ring on one device, bundles by asynchronous copies; bars are for an H200.",
    case=VirtualCase,
    cases=_cases,
    stage=_stage,
    kind="",
    methods=_methods,
    devices=("cpu", "cuda"),
    repeats=5,
    derive=_derive,
    bars=_bars,
)
