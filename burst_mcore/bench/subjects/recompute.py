"""Recompute policies: a training step of a few layers on a ring, with each way to checkpoint them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from burst_mcore.attention.autotune.cost import allowed_pairs, pass_flops
from burst_mcore.attention.recompute.cuts import cut_for, head_mask
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.shard import Shard
from burst_mcore.bench.core import Bar, Case, Derived, Method, Stage, Subject, Table, Trial, World
from burst_mcore.bench.gate import relative
from burst_mcore.bench.memory import peak_bytes
from burst_mcore.bench.methods import METHODS
from burst_mcore.bench.methods.attention import attended
from burst_mcore.bench.methods.layers import Checkpointing, as_it_is
from burst_mcore.config import BurstConfig
from burst_mcore.explain.problem import DTYPES
from burst_mcore.layout import Layout, positions
from burst_mcore.mask import Mask

GATE_TOKENS = 256
"""A method must give the gradients of no recompute on as many tokens before it is measured, at most."""
WRONG = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.02}
"""A method whose gradients differ by more, relative to their norm, is wrong."""
CLOSE = 0.05
"""How far what is saved may be from what the FLOP model says."""


@dataclass(frozen=True, kw_only=True)
class LayersCase(Case):
    """Layers of which a training step is taken. Raises ValueError where a field is not legal."""

    ranks: int = 2
    seq: int = 16384
    """Tokens in the global sequence, a batch of one."""
    hidden: int = 512
    heads: int = 8
    layers: int = 4
    layout: str = "striped"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("ranks", "seq", "hidden", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got {self.heads} and {self.hidden}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        divisor = Layout.of(self.layout).divisor(self.ranks)
        if self.seq % divisor:
            raise ValueError(f"seq must be a multiple of {divisor} with {self.layout}, got {self.seq}")


class Layer(nn.Module):
    """A layer as Llama has them: norms, attention, a gated MLP."""

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
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.around_attention(self.attend, q, k, v).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        out: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out


class Model(nn.Module):
    """The layers, each called by a method; CPU seconds of recomputations are summed."""

    def __init__(self, case: LayersCase, world: World) -> None:
        super().__init__()
        torch.manual_seed(0)
        topology = Topology.from_group(world.group) if world.size > 1 else Topology.single()
        self.layers = nn.ModuleList(Layer(case, topology) for _ in range(case.layers))
        rows = len(positions(case.seq, rank=world.rank, size=world.size, layout=case.layout))
        generator = torch.Generator().manual_seed(1 + world.rank)
        x = torch.randn(1, rows, case.hidden, generator=generator)
        self.x = x.to(DTYPES[case.dtype]).requires_grad_()
        self.recompute_seconds = 0.0

    def step(self, method: Checkpointing) -> dict[str, float]:
        """Forward and backward; CPU seconds of recomputations."""
        self.forget()
        self.recompute_seconds, x = 0.0, self.x
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.around_attention = partial(self._around_attention, method)
            x = method.layer(self._clocked(layer), x)
        x.square().mean().backward()
        return {"recomputing": self.recompute_seconds}

    def forget(self) -> None:
        """Drop the gradients, which a step makes."""
        self.x.grad = None
        self.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the input and of all parameters."""
        found = [self.x.grad, *(p.grad for p in self.parameters())]
        return [g.double().clone() for g in found if g is not None]

    def attention(self) -> None:
        """Attention's forward of all layers, alone."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        with torch.no_grad():
            q, k, v = layer.qkv(self.x).unflatten(-1, (3, layer.heads, -1)).unbind(2)
            for _ in self.layers:
                layer.attend(q, k, v)

    def _around_attention(self, method: Checkpointing, attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
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
            finally:  # torch ends a recomputation by an exception, once all is there
                self.recompute_seconds += 0.0 if first else time.process_time() - start

        return call


def _stage(case: LayersCase, world: World) -> Stage:
    divisor = Layout.of(case.layout).divisor(world.size)
    seq = max(divisor, min(case.seq, GATE_TOKENS) // divisor * divisor)
    short, model = Model(replace(case, seq=seq), world), Model(case, world)
    short.step(Checkpointing())
    want = short.gradients()

    def trial(method: Method) -> Trial:
        built: Checkpointing = method.build(case, world)

        def memory() -> Mapping[str, float]:
            model.forget()
            peak = peak_bytes(lambda: model.step(built), "cpu")
            return {} if peak is None else {"peak": float(peak)}

        def check() -> Mapping[str, float]:
            short.step(built)
            return {"error": max(map(relative, short.gradients(), want))}

        return Trial(
            {"": lambda: model.step(built)},
            warm=lambda: short.step(built),
            memory=memory,
            check=check,
            bound=WRONG[case.dtype],
        )

    return Stage(trial, {"attention's forward": Trial({"": model.attention})})


def shares_recomputed(name: str, policy: object, case: LayersCase) -> float:
    """Return the share of the forward's query-key pairs that is recomputed."""
    if policy is None:
        return float(name in ("megatron full", "megatron selective"))
    share, _ = policy.share(0)  # type: ignore[attr-defined]
    mask, layout = Mask.causal(), Layout.of(case.layout)
    cut = cut_for(share, layout, mask, case.seq, case.ranks).position
    return allowed_pairs(mask & head_mask(cut, case.seq), case.seq) / allowed_pairs(mask, case.seq)


def policy_of(name: str) -> object:
    """Return the policy of a method of ours, None of others."""
    build = METHODS["layers"][name].build
    return build.args[0] if isinstance(build, partial) and not isinstance(build.args[0], str) else None


def _derive(case: LayersCase, table: Table) -> Derived:
    """Yield the savings beside full recompute, and those that the FLOP model predicts.

    The model: the time of attention's own forward, times the share that is not recomputed.
    """
    dim = case.hidden // case.heads
    shard = Shard(
        batch=1,
        tokens=case.seq // case.ranks,
        heads=case.heads,
        kv_heads=case.heads,
        head_dim=dim,
        value_dim=dim,
        dtype=torch.float32,
    )
    flops = case.layers * pass_flops(shard, allowed_pairs(Mask.causal(), case.seq), Pass.FORWARD)
    for name in (m for m, meter in table if meter == "error"):
        policy = policy_of(name) if name in METHODS["layers"] else None
        again = shares_recomputed(name, policy, case)
        yield name, "attention forward flops", [round(flops * (1 + again))]
        if policy is None or ("full", "recomputing") not in table:
            continue
        full, mine = table["full", "recomputing"], table[name, "recomputing"]
        saved = [a - b for a, b in zip(full, mine, strict=True)]
        yield name, "saved", saved
        predicted = [(1 - again) * s for s in table["attention's forward", "cpu"]]
        yield name, "predicted", predicted
        if again < 1:
            yield name, "off the FLOP model", [abs(_median(saved) / _median(predicted) - 1)]


def _median(samples: Sequence[float]) -> float:
    return float(torch.tensor(samples, dtype=torch.float64).quantile(0.5))


def _cases(device: str) -> Mapping[str, LayersCase]:
    return {"4 layers": LayersCase()}


def _bars(name: str, case: LayersCase | None, device: str) -> Sequence[Bar]:
    ours = [m for m in METHODS["layers"] if policy_of(m) is not None and m != "full"] if case else []
    return [Bar(f"{m}: time saved, off the FLOP model's", m, "off the FLOP model", CLOSE) for m in ours]


SUBJECT = Subject(
    name="recompute",
    about="A training step of Llama-like layers on a ring, with each way to checkpoint them.",
    case=LayersCase,
    cases=_cases,
    stage=_stage,
    kind="layers",
    derive=_derive,
    bars=_bars,
    curve=("peak", "cpu"),
)
