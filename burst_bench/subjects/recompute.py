"""Checkpointed layers: a training step with each policy on a ring, and with offload on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import ClassVar

import torch
from torch import Tensor, nn

from burst_bench.core import Bar, Case, Derived, Method, Stage, Table, Trial, World, one_of
from burst_bench.gate import relative
from burst_bench.memory import peak_meter
from burst_bench.methods.attention import attended, share_of
from burst_bench.methods.layers import KEPT, OFFLOADED, POLICIES, LayerMethod, as_it_is
from burst_mcore import BurstConfig, Layout, Mask, Topology, positions
from burst_mcore.attention.geometry.cuts import cut_for
from burst_mcore.attention.geometry.plan import prefix_mask
from burst_mcore.attention.schedule.actions import Pass
from burst_plan.explain.problem import DTYPES
from burst_plan.simulate.cost import allowed_pairs, pass_flops

WRONG = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""The limit of the difference of a method's gradients, relative to their norm."""
CLOSE = 0.05
"""The limit of the difference between saved time and that of the FLOP model."""


class LayersCase(Case):
    """A training step of Llama-like layers on a ring, with each way to checkpoint them."""

    subject = "recompute"
    kind = "layers"
    gate: ClassVar[int | None] = 256
    """Most tokens on which a method must give the gradients of no recompute before it is measured."""

    ranks: int = 2
    seq: int = 16384
    """Tokens in the global sequence, a batch of one."""
    hidden: int = 512
    heads: int = 8
    layers: int = 4
    layout: str = "striped"
    dtype: str = one_of("float32", DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got {self.heads} and {self.hidden}")
        if self.seq % self.divisor:
            raise ValueError(f"seq must be a multiple of {self.divisor} with {self.layout}, got {self.seq}")

    @property
    def divisor(self) -> int:
        """The divisor of the number of tokens in the layout."""
        return Layout.of(self.layout).divisor(self.ranks)

    @property
    def pairs(self) -> int:
        return allowed_pairs(Mask.causal(), self.seq)

    def share_recomputed(self, name: str) -> float:
        """Return the share of the forward's query-key pairs that a method recomputes."""
        if name not in POLICIES:
            return float(name in ("megatron full", "megatron selective"))
        share, _ = POLICIES[name].share(0)
        cut = cut_for(share, Layout.of(self.layout), Mask.causal(), self.seq, self.ranks).position
        return allowed_pairs(Mask.causal() & prefix_mask(cut, self.seq), self.seq) / self.pairs

    def prepare(self, world: World) -> Stage:
        seq = max(self.divisor, min(self.seq, self.gate or self.seq) // self.divisor * self.divisor)
        short, model = LayerStack(replace(self, seq=seq), world), LayerStack(self, world)
        short.step(LayerMethod())
        want = list(short.gradients())

        def trial(method: Method) -> Trial:
            built: LayerMethod = method.build(self, world)

            def check() -> Mapping[str, float]:
                meters = self.memory(model, built)
                short.step(built)
                return {**meters, "error": max(map(relative, short.gradients(), want))}

            step, warm = partial(model.step, built), partial(short.step, built)
            return Trial({"": step}, warm=warm, check=check, bound=WRONG[self.dtype])

        return Stage(trial, {"attention's forward": Trial({"": model.attention})})

    def memory(self, model: LayerStack, method: LayerMethod) -> Mapping[str, float]:
        """Return the peak memory of a step."""
        model.zero_grad()
        return peak_meter(lambda: model.step(method), "cpu")

    def derive(self, table: Table) -> Derived:
        """Yield the time saved against full recompute, measured and predicted by the FLOP model.

        The model: the time of attention's forward, times the share that is not recomputed.
        """
        share = share_of(self.seq // self.ranks, self.heads, self.heads, self.hidden // self.heads)
        flops = self.layers * pass_flops(share, self.pairs, Pass.FORWARD)
        for name in (m for m, meter in table if meter == "error"):
            again = self.share_recomputed(name)
            yield name, "attention forward flops", [round(flops * (1 + again))]
            if name not in POLICIES or ("full", "recomputing") not in table:
                continue
            pairs = zip(table["full", "recomputing"], table[name, "recomputing"], strict=True)
            saved = [full - ours for full, ours in pairs]
            predicted = [(1 - again) * seconds for seconds in table["attention's forward", "cpu"]]
            yield name, "saved", saved
            yield name, "predicted", predicted
            if again < 1:
                yield name, "off the FLOP model", [abs(median(saved) / median(predicted) - 1)]

    def bars(self, device: str) -> Sequence[Bar]:
        claim, meter = "{}: time saved, off the FLOP model's", "off the FLOP model"
        return [Bar(claim.format(name), name, meter, CLOSE) for name in POLICIES if name != "full"]


class Layer(nn.Module):
    """A layer of Llama: norms, attention, a gated MLP."""

    def __init__(self, case: LayersCase, topology: Topology) -> None:
        super().__init__()
        hidden, dtype = case.hidden, DTYPES[case.dtype]
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        self.heads = case.heads
        config = BurstConfig(layout=case.layout)
        self.attend = partial(attended, topology=topology, mask=Mask.causal(), config=config)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, dtype=dtype) for _ in range(2))
        self.qkv, self.out = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up, self.down = linear(hidden, 8 * hidden // 3 * 2), linear(8 * hidden // 3, hidden)
        self.around_attention: Callable[..., Tensor] = as_it_is

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.around_attention(self.attend, *self.heads_of(self.norms[0](x))).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        out: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out

    def heads_of(self, x: Tensor) -> tuple[Tensor, ...]:
        qkv: tuple[Tensor, ...] = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return qkv


class LayerStack(nn.Module):
    """The layers, each called by a method; CPU seconds of recomputations are summed."""

    def __init__(self, case: LayersCase, world: World) -> None:
        super().__init__()
        torch.manual_seed(0)
        topology = Topology.from_group(world.group) if world.size > 1 else Topology.single()
        self.layers = [Layer(case, topology) for _ in range(case.layers)]
        self.registered = nn.ModuleList(self.layers)
        rows = len(positions(case.seq, rank=world.rank, size=world.size, layout=case.layout))
        generator = torch.Generator().manual_seed(1 + world.rank)
        x = torch.randn(1, rows, case.hidden, generator=generator)
        self.x = nn.Parameter(x.to(DTYPES[case.dtype]))
        self.recompute_seconds = 0.0
        self.to(world.device)

    def forward(self, method: LayerMethod) -> Tensor:
        x: Tensor = self.x
        for layer in self.layers:
            layer.around_attention = partial(self._around_attention, method)
            x = method.layer(self._clocked(layer), x)
        return x

    def step(self, method: LayerMethod) -> dict[str, float]:
        """Run forward and backward; return CPU seconds of recomputations."""
        self.zero_grad()
        self.recompute_seconds = 0.0
        self.forward(method).square().mean().backward()
        return {"recomputing": self.recompute_seconds}

    def gradients(self) -> Iterator[Tensor]:
        return (p.grad.double() for p in self.parameters() if p.grad is not None)

    def attention(self) -> None:
        """Run only attention's forward of all layers."""
        with torch.no_grad():
            qkv = self.layers[0].heads_of(self.x)
            for _ in self.layers:
                self.layers[0].attend(*qkv)

    def _around_attention(self, method: LayerMethod, attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
        alone = method.layer is as_it_is  # else attention is called again as part of its layer
        return method.attention(self._clocked(attend) if alone else attend, *qkv)

    def _clocked(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Time calls of the function after the first: they are recomputations."""
        called = False

        def call(*x: Tensor) -> Tensor:
            nonlocal called
            first, called = not called, True
            start = time.process_time()
            try:
                return function(*x)
            finally:  # torch ends a complete recomputation by an exception
                self.recompute_seconds += 0.0 if first else time.process_time() - start

        return call


class OffloadCase(LayersCase):
    """A training step of checkpointed layers on one device, with attention's results there or on the host."""

    subject = "offload"
    kind = "offload"
    devices = ("cpu", "cuda")
    repeats = 5
    gate = None  # tensors in transfer while layers compute must be right, too

    ranks: int = 1
    seq: int = 32768
    hidden: int = 4096
    """The width of a model of 8 billion parameters."""
    heads: int = 32
    dtype: str = one_of("bfloat16", DTYPES)

    def memory(self, model: LayerStack, method: LayerMethod) -> Mapping[str, float]:
        """Return the device memory that is held after a forward, for backward."""
        if model.x.device.type != "cuda":
            return {"held": 0.0}
        before = torch.cuda.memory_allocated()
        y = model(method)
        torch.cuda.synchronize()
        size = torch.cuda.memory_allocated() - before
        del y
        return {"held": float(size)}

    def derive(self, table: Table) -> Derived:
        yield OFFLOADED, "this / kept", table.over((OFFLOADED, "wall"), (KEPT, "wall"))
        both = table.get((KEPT, "held"), ()), table.get((OFFLOADED, "held"), ())
        results = self.layers * self.seq * (self.hidden * DTYPES[self.dtype].itemsize + 4 * self.heads)
        shares = [(on_device - offloaded) / results for on_device, offloaded in zip(*both, strict=False)]
        yield OFFLOADED, "left / (O and LSE)", shares

    def bars(self, device: str) -> tuple[()]:
        return ()
