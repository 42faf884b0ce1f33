"""Runs LM heads side by side: each in a process of its own, in turn with its matrix products and ours."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from burst_mcore.bench.head_memory import LargestMade, peak_bytes
from burst_mcore.bench.head_methods import IGNORED, METHODS, OURS, HeadLoss, Method
from burst_mcore.bench.run import fresh_processes, keep_freed_memory
from burst_mcore.explain.problem import DTYPES
from burst_mcore.loss import reference

MASKED = 1 / 16
"""Of the tokens, at random, have no loss, where nothing else is asked for."""
GATE_TOKENS = 512
"""Of the problem on which a method must be right before it is timed, at most."""
WRONG = 0.1
"""A method with a larger relative error in loss or gradients is wrong, in whatever dtype."""
WARM_TOKENS = 64
LARGE = 10**9
"""Logits of so many elements are not made at once, not even for the three products alone."""
PRODUCT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""There the products go over so many tokens at once."""


@dataclass(frozen=True)
class HeadProblem:
    """One LM head with its loss. Raises ValueError where a field is not legal."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str = "float32"
    masked: float = MASKED

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"tokens, hidden size and vocabulary must be at least 1, got {self.shape}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not 0.0 <= self.masked < 1.0:
            raise ValueError(f"the masked share of tokens must be at least 0 and below 1, got {self.masked}")

    @classmethod
    def of(cls, shape: str, dtype: str, masked: float = MASKED) -> HeadProblem:
        """From a text such as 4096x1024x32000: tokens, hidden size, vocabulary."""
        parts = shape.split("x")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"a shape is tokens x hidden x vocabulary, as 4096x1024x32000, got {shape!r}")
        tokens, hidden, vocabulary = map(int, parts)
        return cls(tokens, hidden, vocabulary, dtype, masked)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tokens, self.hidden, self.vocabulary

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.sizes))

    @property
    def logits(self) -> int:
        """Elements of all logits."""
        return self.tokens * self.vocabulary

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden [N, d], weight [V, d], labels [N]), the first two with gradients; the same every time."""
        generator, (n, d, v) = torch.Generator(device).manual_seed(0), self.sizes
        weight = torch.empty(v, d, device=device).normal_(std=d**-0.5, generator=generator)
        hidden = torch.empty(n, d, device=device).normal_(generator=generator)
        labels = torch.empty(n, dtype=torch.int64, device=device).random_(v, generator=generator)
        masked = torch.empty(n, device=device).uniform_(generator=generator) < self.masked
        masked[0] = False
        labels.masked_fill_(masked, IGNORED)
        dtype = DTYPES[self.dtype]
        return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


@dataclass(frozen=True)
class Errors:
    """Relative to the same in float64 from the same inputs, by the Frobenius norm."""

    loss: float
    d_hidden: float
    d_weight: float
    over: str
    """The shape on which they were found."""

    @property
    def wrong(self) -> bool:
        return not all(x <= WRONG for x in (self.loss, self.d_hidden, self.d_weight))  # also where one is NaN


@dataclass(frozen=True)
class Row:
    """What was found of a method: forward and backward of the mean loss."""

    method: str
    shape: str
    dtype: str
    device: str
    masked: float = MASKED
    times: tuple[float, ...] = ()
    """Seconds of each repeat, of all its processes; none if it was not timed."""
    products_times: tuple[float, ...] = ()
    """Of the three matrix products alone, in turn with the method."""
    ours_times: tuple[float, ...] = ()
    """Of our own method, in turn with this one; none where that was not asked for."""
    peak_bytes: int | None = None
    """Beyond the inputs; the gradients that are handed out are in it. This and the next: of one process."""
    largest: float | None = None
    """Elements of the largest tensor that was made, as a part of N x V; None where it cannot be seen."""
    errors: Errors | None = None
    why_not: str | None = None
    """Why it was not timed."""

    @property
    def seconds(self) -> float | None:
        """Median of the repeats."""
        return _median(self.times)

    @property
    def products_seconds(self) -> float | None:
        """Median of the repeats."""
        return _median(self.products_times)

    @property
    def of_products(self) -> float | None:
        """Median of the repeats' ratios."""
        return _median_ratio(self.times, self.products_times)

    @property
    def ours_over(self) -> float | None:
        """Ours over this: median of the repeats' ratios."""
        return _median_ratio(self.ours_times, self.times)

    def joined(self, other: Row) -> Row:
        """This, with the times of another process; only that other, if it could not time it."""
        if other.why_not is not None:
            return other
        both = self.ours_times and other.ours_times
        return replace(
            self,
            times=self.times + other.times,
            products_times=self.products_times + other.products_times,
            ours_times=self.ours_times + other.ours_times if both else (),
        )


def _median(found: Sequence[float]) -> float | None:
    return statistics.median(found) if found else None


def _median_ratio(found: Sequence[float], over: Sequence[float]) -> float | None:
    return _median([a / b for a, b in zip(found, over, strict=True)]) if found and over else None


def measure(
    problem: HeadProblem, names: Sequence[str], repeats: int, processes: int, threads: int, device: str
) -> Iterator[Row]:
    """Each method's figures, as they are found; also of those that cannot run, or are wrong, and why.

    Args:
        problem: To solve.
        names: Of the methods. If ours is among them, each of the others is timed in turn with it.
        repeats: Counted rounds in each process.
        processes: Fresh ones for each method: one differs from the next by more than its repeats do.
        threads: Of torch.
        device: "cpu" or "cuda".

    Raises:
        ValueError: a method is unknown.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; legal: {', '.join(METHODS)}")
    ours = METHODS[OURS] if OURS in names else None
    how = repeats, threads, device
    return (
        _over_processes(
            partial(_measured, METHODS[name], None if name == OURS else ours, problem, *how), processes
        )
        for name in names
    )


def _over_processes(once: Callable[[], Row], processes: int) -> Row:
    found = once()
    for _ in range(processes - 1):
        if found.why_not is not None:
            break
        found = found.joined(once())
    return found


def _measured(
    method: Method, beside: Method | None, problem: HeadProblem, repeats: int, threads: int, device: str
) -> Row:
    """In a process of its own; if that fails with ours beside it, in another alone: ours may be to blame."""
    lacking = method.needs(device)
    if lacking is not None:
        return _row(method, problem, device, f"needs {lacking}")
    with ProcessPoolExecutor(1, mp_context=fresh_processes()) as pool:
        try:
            found = pool.submit(_alone, method, beside, problem, repeats, threads, device).result()
        except BrokenProcessPool:
            found = _row(method, problem, device, "its process was ended: too little memory?")
    if found.why_not is None or found.errors is not None or beside is None:
        return found
    return _measured(method, None, problem, repeats, threads, device)


def _row(method: Method, problem: HeadProblem, device: str, why_not: str | None = None) -> Row:
    return Row(method.name, problem.shape, problem.dtype, device, problem.masked, why_not=why_not)


def _alone(
    method: Method, beside: Method | None, problem: HeadProblem, repeats: int, threads: int, device: str
) -> Row:
    """All of a method, in a process where no other ran before. Whatever it may raise is a result."""
    try:
        return _found(method, beside, problem, repeats, threads, device)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return _row(method, problem, device, f"{type(error).__name__}: {lines[0][:200]}")


def _found(
    method: Method, beside: Method | None, problem: HeadProblem, repeats: int, threads: int, device: str
) -> Row:
    torch.set_num_threads(threads)
    loss = method.build(device)
    peak, largest = _memory(method, loss, problem, device)
    errors = _errors(loss, problem, device)
    found = replace(_row(method, problem, device), peak_bytes=peak, largest=largest, errors=errors)
    if errors.wrong:
        return replace(found, why_not="wrong")
    keep_freed_memory()
    losses = [loss] if beside is None else [loss, beside.build(device)]
    products, times, *ours = _times(losses, problem, repeats, device)
    return replace(found, times=tuple(times), products_times=tuple(products), ours_times=tuple(*ours))


def _memory(
    method: Method, loss: HeadLoss, problem: HeadProblem, device: str
) -> tuple[int | None, float | None]:
    warm = problem if method.compiled else replace(problem, tokens=min(problem.tokens, WARM_TOKENS))
    _step(loss, *warm.tensors(device))
    tensors = problem.tensors(device)
    seen = LargestMade(tensors) if method.visible else None
    with seen or nullcontext():
        peak = peak_bytes(lambda: _step(loss, *tensors), device)
    return peak, seen.elements / problem.logits if seen else None


def _step(loss: HeadLoss, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    hidden.grad = weight.grad = None
    found = loss(hidden, weight, labels)
    found.backward()
    return found.detach()


def _errors(loss: HeadLoss, problem: HeadProblem, device: str) -> Errors:
    short = _gate_problem(problem, device)
    hidden, weight, labels = short.tensors(device)
    found = _step(loss, hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = _step(_reference, exact[0], exact[1], labels)
    return Errors(
        loss=_relative(found, wanted),
        d_hidden=_relative(hidden.grad, exact[0].grad),
        d_weight=_relative(weight.grad, exact[1].grad),
        over=short.shape,
    )


def _reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return reference.linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED)


def _relative(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None and want is not None
    return float((got.double() - want).norm() / want.norm())


def _gate_problem(problem: HeadProblem, device: str) -> HeadProblem:
    """The problem with few tokens, and as much of the vocabulary as half of the memory holds in float64."""
    tokens = min(problem.tokens, GATE_TOKENS)
    memory = (
        torch.cuda.mem_get_info()[1]
        if device == "cuda"
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    of_a_row = 8 * (4 * problem.hidden + 10 * tokens)  # copies that live at once, in backward at most
    return replace(problem, tokens=tokens, vocabulary=min(problem.vocabulary, memory // 2 // of_a_row))


def _times(losses: Sequence[HeadLoss], problem: HeadProblem, repeats: int, device: str) -> list[list[float]]:
    """Seconds of the products alone, then of each loss: in turn, after a round that is not counted.

    The losses' order is turned round every time, so that a machine that slows down favours none.
    """
    tensors = problem.tensors(device)
    products = three_products(tensors[0].detach(), tensors[1].detach())
    steps: list[tuple[int, Callable[[], object]]] = [
        (at, partial(_step, loss, *tensors)) for at, loss in enumerate(losses, 1)
    ]
    clocks: list[list[float]] = [[], *([] for _ in losses)]
    for repeat in range(-1, repeats):
        for at, run in [(0, products), *steps[:: -1 if repeat % 2 else 1]]:
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if repeat >= 0:
                clocks[at].append(time.perf_counter() - start)
    return clocks


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def three_products(hidden: Tensor, weight: Tensor) -> Callable[[], object]:
    """Logits, what they give hidden states, what they give the weight, of all tokens.

    In the dtype of hidden [N, d] and weight [V, d], into memory that is there before.
    """
    tokens, large = len(hidden), len(hidden) * len(weight) >= LARGE
    step = min(tokens, PRODUCT_TOKENS[hidden.device.type]) if large else tokens
    logits = hidden.new_empty(step, len(weight))
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        for first in range(0, tokens, step):
            h = hidden[first : first + step]
            x = logits[: len(h)]
            torch.mm(h, weight.t(), out=x)
            torch.mm(x, weight, out=of_hidden[first : first + step])
            if first:
                of_weight.addmm_(x.t(), h)
            else:
                torch.mm(x.t(), h, out=of_weight)

    return run
