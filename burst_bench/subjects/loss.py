"""The LM head and its loss: time against three matrix products alone, peak memory, accuracy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from burst_bench.core import Bar, Case, Derived, Method, Stage, Table, Trial, World, one_of
from burst_bench.gate import relative
from burst_bench.memory import LargestMade, peak_meter
from burst_bench.methods.heads import IGNORED, HeadLoss, HeadMethod, plain
from burst_plan.explain.problem import DTYPES

OURS = "burst"
MASKED = 1 / 16
"""The default share of tokens without loss, chosen at random."""
GATE_TOKENS = 512
"""Most tokens of the problem on which a method must be right before it is timed."""
WRONG = 0.1
"""The limit of a method's relative error in loss or gradients, in any dtype."""
WARM_TOKENS = 64
LARGE = 10**9
"""Logits of this many elements are not made at once, not even for the three products alone."""
PRODUCT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of each product in that case."""
SHAPES = {
    "cpu": ((4096, 1024, 32000), (8192, 1024, 128256)),
    "cuda": ((4096, 4096, 128256), (32768, 4096, 128256)),
}
"""Tokens, hidden size and vocabulary of shapes with bars."""
OF_PRODUCTS = {"cpu": {"float32": 1.10, "bfloat16": 1.35}, "cuda": {"float32": 1.10, "bfloat16": 1.10}}
"""Most time over the three products alone."""
NO_SLOWER = {"cpu": ("compiled-naive",), "cuda": ("liger", "cce")}
NO_LARGER = {"cpu": ("torch", "deepspeed", "compiled-naive"), "cuda": ()}
"""Methods whose peak memory ours must not exceed, if all logits together are LARGE."""


class HeadCase(Case):
    """Forward and backward of an LM head with the mean loss of its tokens.

    Each method has processes of its own, in turn with its three matrix products and with ours.
    """

    subject = "loss"
    kind = "heads"
    devices = ("cpu", "cuda")
    beside = OURS

    threads: int = os.cpu_count() or 1
    tokens: int = 4096
    hidden: int = 1024
    vocabulary: int = 32000
    dtype: str = one_of("float32", DTYPES)
    masked: float = MASKED

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.masked < 1.0:
            raise ValueError(f"the masked share of tokens must be at least 0 and below 1, got {self.masked}")

    @classmethod
    def named(cls, device: str) -> Mapping[str, HeadCase]:
        dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
        return {
            f"{n}x{d}x{v}, {dtype}": cls(tokens=n, hidden=d, vocabulary=v, dtype=dtype)
            for n, d, v in SHAPES[device]
            for dtype in dtypes
        }

    @property
    def logits(self) -> int:
        return self.tokens * self.vocabulary

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden [N, d], weight [V, d], labels [N], always the same; the first two with gradients."""
        generator, n, v = torch.Generator(device).manual_seed(0), self.tokens, self.vocabulary
        weight = torch.empty(v, self.hidden, device=device)
        weight.normal_(std=self.hidden**-0.5, generator=generator)
        hidden = torch.empty(n, self.hidden, device=device).normal_(generator=generator)
        labels = torch.empty(n, dtype=torch.int64, device=device).random_(v, generator=generator)
        masked = torch.empty(n, device=device).uniform_(generator=generator) < self.masked
        masked[0] = False
        labels.masked_fill_(masked, IGNORED)
        dtype = DTYPES[self.dtype]
        return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels

    def prepare(self, world: World) -> Stage:
        @cache  # made at the first use: after memory was measured
        def tensors() -> tuple[Tensor, ...]:
            return self.tensors(world.device)

        @cache
        def products() -> Callable[[], None]:
            return three_products(*(x.detach() for x in tensors()[:2]))

        def trial(method: Method) -> Trial:
            head: HeadMethod = method.build(self, world)
            warm = self if head.compiled else replace(self, tokens=min(self.tokens, WARM_TOKENS))
            return Trial(
                {"": lambda: step(head.loss, *tensors())},
                warm=lambda: step(head.loss, *warm.tensors(world.device)),
                check=lambda: memory(head, self, world.device) | errors(head.loss, self, world.device),
                bound=WRONG,
            )

        return Stage(trial, {"products": Trial({"": lambda: products()()})})

    def derive(self, table: Table) -> Derived:
        peaks = table.column("peak")
        for method in table.methods:
            yield method, "wall / products", table.over((method, "wall"), (method, "products wall"))
            yield method, "burst / this", table.over((method, f"{OURS} wall"), (method, "wall"))
            if method != OURS and method in peaks and OURS in peaks and peaks[method][0]:
                yield method, "burst peak / this", [peaks[OURS][0] / peaks[method][0]]

    def bars(self, device: str) -> Sequence[Bar]:
        """Return bars for few masked tokens: more make it easier for methods that skip them."""
        if self.masked > MASKED or (self.tokens, self.hidden, self.vocabulary) not in SHAPES[device]:
            return ()
        bars = []
        if self.dtype in OF_PRODUCTS[device]:
            products = OF_PRODUCTS[device][self.dtype]
            bars.append(Bar("time over the three products alone", OURS, "wall / products", products))
        for other in NO_SLOWER[device]:
            bars.append(Bar(f"time over that of {other}, in turn", other, "burst / this", 1.0))
        for other in NO_LARGER[device] if self.logits >= LARGE else ():
            bars.append(Bar(f"peak memory over that of {other}", other, "burst peak / this", 1.0))
        below = 1.0 - 1.0 / self.logits
        return [*bars, Bar("largest tensor made over N x V, below 1", OURS, "largest / (N x V)", below)]


def step(loss: HeadLoss, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Run forward and backward; return the loss."""
    hidden.grad = weight.grad = None
    value = loss(hidden, weight, labels)
    value.backward()
    return value.detach()


def memory(head: HeadMethod, case: HeadCase, device: str) -> dict[str, float]:
    """Return peak memory beyond the inputs, its gradients, and the largest tensor as a part of N x V."""
    tensors = case.tensors(device)
    largest = LargestMade(tensors) if head.visible else None
    with largest or nullcontext():
        meters = peak_meter(lambda: step(head.loss, *tensors), device)
    return meters if largest is None else {**meters, "largest / (N x V)": largest.elements / case.logits}


def errors(loss: HeadLoss, case: HeadCase, device: str) -> dict[str, float]:
    """Return errors relative to float64 from the same inputs, and the number of compared elements."""
    short = gate_case(case, device)
    hidden, weight, labels = short.tensors(device)
    value = step(loss, hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = step(plain, exact[0], exact[1], labels)
    return {
        "loss error": relative(value, want),
        "d_hidden error": relative(hidden.grad, exact[0].grad),
        "d_weight error": relative(weight.grad, exact[1].grad),
        "gate tokens": short.tokens,
        "gate vocabulary": short.vocabulary,
    }


def gate_case(case: HeadCase, device: str) -> HeadCase:
    """Return the problem with few tokens, and a vocabulary that fits half of the memory in float64."""
    tokens = min(case.tokens, GATE_TOKENS)
    on_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = torch.cuda.mem_get_info()[1] if device == "cuda" else on_host
    of_a_row = 8 * (4 * case.hidden + 10 * tokens)  # live copies, at the peak of backward
    return replace(case, tokens=tokens, vocabulary=min(case.vocabulary, memory // 2 // of_a_row))


def three_products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """Return a step of three products: logits, gradient of the hidden states, gradient of the weight.

    In the dtype of hidden [N, d] and weight [V, d], into preallocated memory.
    """
    tokens, large = len(hidden), len(hidden) * len(weight) >= LARGE
    part = min(tokens, PRODUCT_TOKENS[hidden.device.type]) if large else tokens
    logits = hidden.new_empty(part, len(weight))
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        for index, (h, of_h) in enumerate(zip(hidden.split(part), of_hidden.split(part), strict=True)):
            x = torch.mm(h, weight.t(), out=logits[: len(h)])
            torch.mm(x, weight, out=of_h)
            of_weight.addmm_(x.t(), h, beta=min(index, 1))  # the first overwrites

    return run
