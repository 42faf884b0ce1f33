"""Offload: a step of checkpointed layers on one device, with it and without, and the bytes that left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from burst_bench.core import Derived, Method, Stage, Table, Trial, World, one_of
from burst_bench.gate import relative
from burst_bench.subjects.recompute import WRONG, Layer, LayersCase
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.checkpointing import KeepAttention, Offload, checkpoint
from burst_plan.explain.problem import DTYPES

KEPT, OFFLOADED = "kept", "offloaded"
POLICIES = {KEPT: KeepAttention(), OFFLOADED: Offload(KeepAttention())}


@dataclass(frozen=True, kw_only=True)
class OffloadCase(LayersCase):
    """A training step of checkpointed layers on one device, with attention's results there or on the host."""

    subject = "offload"
    kind = ""
    own = (KEPT, OFFLOADED)
    devices = ("cpu", "cuda")
    repeats = 5
    curve = None

    ranks: int = 1
    seq: int = 32768
    hidden: int = 4096
    """As wide as a model of 8 billion parameters."""
    heads: int = 32
    dtype: str = one_of("bfloat16", DTYPES)

    @classmethod
    def named(cls, device: str) -> Mapping[str, OffloadCase]:
        return {"4 layers of 32K tokens": cls()}

    @property
    def kept_bytes(self) -> int:
        """The size of O and LSE of all layers."""
        return self.layers * self.seq * (self.hidden * DTYPES[self.dtype].itemsize + 4 * self.heads)

    def prepare(self, world: World) -> Stage:
        torch.manual_seed(0)
        layers = nn.ModuleList(Layer(self, Topology.single()) for _ in range(self.layers)).to(world.device)
        x = torch.randn(1, self.seq, self.hidden, device=world.device)
        x = x.to(DTYPES[self.dtype]).requires_grad_()

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
                bound=WRONG[self.dtype],
            )

        return Stage(trial)

    def derive(self, table: Table) -> Derived:
        yield OFFLOADED, "this / kept", table.over((OFFLOADED, "wall"), (KEPT, "wall"))
        both = table.get((KEPT, "held"), ()), table.get((OFFLOADED, "held"), ())
        left = [(kept - offloaded) / self.kept_bytes for kept, offloaded in zip(*both, strict=False)]
        yield OFFLOADED, "left / (O and LSE)", left

    def bars(self, device: str) -> tuple[()]:
        return ()
