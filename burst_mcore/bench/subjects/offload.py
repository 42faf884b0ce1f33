"""Offload: a step of checkpointed layers on one device, with it and without, and the bytes that left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.bench.core import Derived, Method, Stage, Subject, Table, Trial, World, over
from burst_mcore.bench.gate import relative
from burst_mcore.bench.subjects.recompute import WRONG, Layer, LayersCase
from burst_mcore.checkpointing import KeepAttention, Offload, checkpoint
from burst_mcore.explain.problem import DTYPES

KEPT, OFFLOADED = "kept", "offloaded"
POLICIES = {KEPT: KeepAttention(), OFFLOADED: Offload(KeepAttention())}


@dataclass(frozen=True, kw_only=True)
class OffloadCase(LayersCase):
    """Layers on one device, as wide as those of a model of 8 billion parameters."""

    ranks: int = 1
    seq: int = 32768
    hidden: int = 4096
    heads: int = 32
    dtype: str = "bfloat16"

    @property
    def kept_bytes(self) -> int:
        """The size of O and LSE of all layers."""
        return self.layers * self.seq * (self.hidden * DTYPES[self.dtype].itemsize + 4 * self.heads)


def _build(case: OffloadCase, world: World) -> None:
    """Do nothing: the stage makes the layers, which both methods share."""


def _methods(case: OffloadCase) -> Mapping[str, Method]:
    return {name: Method(name, _build) for name in POLICIES}


def _stage(case: OffloadCase, world: World) -> Stage:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(case, Topology.single()) for _ in range(case.layers)).to(world.device)
    x = torch.randn(1, case.seq, case.hidden, device=world.device).to(DTYPES[case.dtype]).requires_grad_()

    def forward(name: str) -> Tensor:
        y: Tensor = x
        for layer in layers:
            y = checkpoint(layer, y, policy=POLICIES[name])
        return y

    def step(name: str) -> Tensor:
        x.grad = None
        layers.zero_grad()
        forward(name).square().mean().backward()
        assert x.grad is not None
        return x.grad

    def held(name: str) -> Mapping[str, float]:
        """Memory of the device that a forward leaves taken for backward."""
        if world.device != "cuda":
            return {"held": 0.0}
        before = torch.cuda.memory_allocated()
        y = forward(name)
        torch.cuda.synchronize()
        taken = torch.cuda.memory_allocated() - before
        del y
        return {"held": float(taken)}

    want = step(KEPT).clone()

    def trial(method: Method) -> Trial:
        return Trial(
            {"": lambda: step(method.name)},
            memory=lambda: held(method.name),
            check=lambda: {"error": relative(step(method.name), want)},
            bound=WRONG[case.dtype],
        )

    return Stage(trial)


def _derive(case: OffloadCase, table: Table) -> Derived:
    yield OFFLOADED, "this / kept", over(table, (OFFLOADED, "wall"), (KEPT, "wall"))
    both = table.get((KEPT, "held"), ()), table.get((OFFLOADED, "held"), ())
    yield OFFLOADED, "left / (O and LSE)", [(a - b) / case.kept_bytes for a, b in zip(*both, strict=False)]


def _cases(device: str) -> Mapping[str, OffloadCase]:
    return {"4 layers of 32K tokens": OffloadCase()}


SUBJECT = Subject(
    name="offload",
    about="A training step of checkpointed layers on one device, with what attention keeps there or on the "
    "host.",
    case=OffloadCase,
    cases=_cases,
    stage=_stage,
    kind="",
    methods=_methods,
    devices=("cpu", "cuda"),
    repeats=5,
    derive=_derive,
)
