"""Measures recompute policies: a training step of a few layers on a ring, each way in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.attention.autotune.cost import allowed_pairs, pass_flops
from burst_mcore.attention.recompute.cuts import cut_for, front
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.head_memory import peak_bytes
from burst_mcore.bench.recompute_methods import METHODS, Attend, Layer, Method, Stack
from burst_mcore.bench.run import in_processes
from burst_mcore.explain.problem import DTYPES
from burst_mcore.layout import Layout, positions
from burst_mcore.mask import Mask

GATE_TOKENS = 256
"""A method must give the gradients of no recompute on as many tokens before it is measured, at most."""
WRONG = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""A method whose gradients differ by more, relative to their norm, is wrong."""


@dataclass(frozen=True)
class Row:
    """A training step of one method: forward and backward, medians over repeats."""

    method: str
    cpu_seconds: float
    """Of all ranks together."""
    wall_seconds: float
    recompute_seconds: float
    """CPU seconds in recomputations of layers, of all ranks together."""
    saved_seconds: float | None
    """Those of full recompute less these: medians of the repeats' differences."""
    predicted_seconds: float | None
    """What the FLOP model says is saved: attention's own forward, times the share that is not recomputed."""
    peak_bytes: int | None
    """Of a step, beyond model and input, of the rank with most."""
    attention_flops: int
    """Of attention in forward and recomputation, of all ranks, by the plan."""
    error: float
    """Of its gradients, relative to those without recompute."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def measure(stack: Stack, ranks: int, repeats: int) -> list[Row]:
    """Every method that lacks nothing.

    Raises:
        ValueError: the sequence does not go with the layout and so many ranks.
        RuntimeError: a method is wrong, or a rank failed.
    """
    divisor = Layout.of(stack.layout).divisor(ranks)
    if stack.seq % divisor:
        raise ValueError(f"--seq must be a multiple of {divisor} with {stack.layout}, got {stack.seq}")
    methods = [method for method in METHODS if method.needs() is None]
    at = [METHODS.index(method) for method in methods]
    peaks = in_processes(ranks, _peaks, at, stack, keep_freed=False)[0]
    timed = in_processes(ranks, _timed, at, stack, repeats)[0]
    return [_row(method, stack, ranks, peaks[method.name], timed) for method in methods]


def shares_recomputed(method: Method, stack: Stack, ranks: int) -> float:
    """Of the forward's query-key pairs, those that are computed again."""
    if method.policy is None:
        return float(method.name in ("megatron full", "megatron selective"))
    share, _ = method.policy.share(0)
    mask, layout = Mask.causal(), Layout.of(stack.layout)
    at = cut_for(share, layout, mask, stack.seq, ranks).at
    return allowed_pairs(mask & front(at, stack.seq), stack.seq) / allowed_pairs(mask, stack.seq)


@dataclass
class _Timed:
    cpu: list[float]
    wall: list[float]
    recompute: list[float]
    error: float


def _row(method: Method, stack: Stack, ranks: int, peak: int | None, timed: dict[str, Any]) -> Row:
    found, forward = timed["methods"][method.name], timed["forward"]
    full, again = timed["methods"]["full"], shares_recomputed(method, stack, ranks)
    ours = method.policy is not None
    saved = statistics.median(a - b for a, b in zip(full.recompute, found.recompute, strict=True))
    dim = stack.hidden // stack.heads
    shard = Shard(
        batch=1,
        tokens=stack.seq // ranks,
        heads=stack.heads,
        kv_heads=stack.heads,
        head_dim=dim,
        value_dim=dim,
        dtype=torch.float32,
    )
    flops = stack.layers * pass_flops(shard, allowed_pairs(Mask.causal(), stack.seq), "forward")
    return Row(
        method=method.name,
        cpu_seconds=statistics.median(found.cpu),
        wall_seconds=statistics.median(found.wall),
        recompute_seconds=statistics.median(found.recompute),
        saved_seconds=saved if ours else None,
        predicted_seconds=(1 - again) * statistics.median(forward) if ours else None,
        peak_bytes=peak,
        attention_flops=round(flops * (1 + again)),
        error=found.error,
    )


class _Model(nn.Module):
    """The layers, each called by a method; CPU seconds of recomputations are summed."""

    def __init__(self, stack: Stack, topology: Topology) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(stack, topology) for _ in range(stack.layers))
        self.recompute_seconds = 0.0

    def run(self, method: Method, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.around_attention = partial(self._around_attention, method)
            x = method.layer(self._clocked(layer), x)
        return x

    def _around_attention(self, method: Method, attend: Attend, *qkv: Tensor) -> Tensor:
        alone = method.layer is METHODS[0].layer  # else attention is called again as part of its layer
        return method.attention(self._clocked(attend) if alone else attend, *qkv)

    def _clocked(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function, whose calls after the first are recomputations."""
        called = False

        def call(*x: Tensor) -> Tensor:
            nonlocal called
            first, called = not called, True
            start = time.process_time()
            try:
                return function(*x)
            finally:  # torch ends a recomputation by an exception, once all is there
                self.recompute_seconds += 0.0 if first else time.process_time() - start

        return call


def _made(rank: int, size: int, stack: Stack) -> tuple[_Model, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    topology = Topology.from_group(group) if size > 1 else Topology.single()
    rows = len(positions(stack.seq, rank=rank, size=size, layout=stack.layout))
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(1, rows, stack.hidden, generator=generator).to(DTYPES[stack.dtype])
    return _Model(stack, topology), x.requires_grad_()


def _step(model: _Model, method: Method, x: Tensor) -> None:
    _forget(model, x)
    model.run(method, x).square().mean().backward()


def _peaks(rank: int, size: int, at: Sequence[int], stack: Stack) -> dict[str, int | None]:
    """The peak memory of a step of each method: of the rank with most."""
    short, found = _made(rank, size, _short(stack, size)), {}
    model, x = _made(rank, size, stack)
    for method in [METHODS[index] for index in at]:
        method.prepare()
        _step(short[0], method, short[1])  # what is made once, is made
        _forget(model, x)
        dist.barrier()
        peak = peak_bytes(partial(_step, model, method, x), "cpu")
        every: list[int | None] = [None] * size
        dist.all_gather_object(every, peak)
        known = [each for each in every if each is not None]
        found[method.name] = max(known) if len(known) == size else None
    return found


def _forget(model: nn.Module, x: Tensor) -> None:
    """The gradients, which a step makes."""
    x.grad = None
    model.zero_grad()


def _short(stack: Stack, size: int) -> Stack:
    divisor = Layout.of(stack.layout).divisor(size)
    seq = max(divisor, min(stack.seq, GATE_TOKENS) // divisor * divisor)
    return Stack(**{**asdict(stack), "seq": seq})


def _timed(rank: int, size: int, at: Sequence[int], stack: Stack, repeats: int) -> dict[str, Any]:
    """Clocks of all methods in turn, and CPU seconds of attention's forward in all layers, on every rank."""
    methods = [METHODS[index] for index in at]
    for method in methods:
        method.prepare()
    errors = _gate(rank, size, methods, stack)
    model, x = _made(rank, size, stack)
    found = {method.name: _Timed([], [], [], errors[method.name]) for method in methods}
    forward: list[float] = []
    for repeat in range(-1, repeats):
        for method in methods:
            dist.barrier()
            model.recompute_seconds = 0.0
            cpu, wall = time.process_time(), time.perf_counter()
            _step(model, method, x)
            spent = time.process_time() - cpu, time.perf_counter() - wall, model.recompute_seconds
            if repeat >= 0:
                clock = found[method.name]
                for values, value in zip((clock.cpu, clock.wall, clock.recompute), spent, strict=True):
                    values.append(value)
        seconds = _attention_seconds(model, stack, x)
        forward += [seconds] if repeat >= 0 else []
    sums = [each for clock in found.values() for each in (clock.cpu, clock.recompute)] + [forward]
    for values in sums:
        values[:] = _reduced(values, dist.ReduceOp.SUM)
    for clock in found.values():
        clock.wall[:] = _reduced(clock.wall, dist.ReduceOp.MAX)
    return {"methods": found, "forward": forward}


def _attention_seconds(model: _Model, stack: Stack, x: Tensor) -> float:
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    with torch.no_grad():
        q, k, v = layer.qkv(x).unflatten(-1, (3, stack.heads, -1)).unbind(2)
        dist.barrier()
        start = time.process_time()
        for _ in range(stack.layers):
            layer.attend(q, k, v)
        return time.process_time() - start


def _reduced(values: Sequence[float], how: Any) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, op=how)
    return [float(value) for value in total]


def _gate(rank: int, size: int, methods: Sequence[Method], stack: Stack) -> dict[str, float]:
    """Each method's error on a short sequence; RuntimeError if one is wrong."""
    short = _short(stack, size)
    model, x = _made(rank, size, short)
    _step(model, METHODS[0], x)
    want = _gradients(model, x)
    errors = {}
    for method in methods:
        _step(model, method, x)
        differ = [
            float((got - wanted).norm() / wanted.norm())
            for got, wanted in zip(_gradients(model, x), want, strict=True)
        ]
        errors[method.name] = _reduced([max(differ)], dist.ReduceOp.MAX)[0]
        if not errors[method.name] <= WRONG[DTYPES[stack.dtype]]:
            raise RuntimeError(f"{method.name} is wrong: its gradients are off by {errors[method.name]:.1e}")
    return errors


def _gradients(model: _Model, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [g.double().clone() for g in found if g is not None]
