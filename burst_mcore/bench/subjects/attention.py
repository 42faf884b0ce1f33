"""One attention layer, forward and backward: each method's CPU seconds beside the bare kernel's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from burst_mcore.bench import gate
from burst_mcore.bench.core import Derived, Method, Stage, Table, Trial, World
from burst_mcore.bench.methods.attention import Attention, RingCase


@dataclass(frozen=True, kw_only=True)
class AttentionCase(RingCase):
    """Forward and backward of one attention layer over gloo; errors are multiples of the bare kernel's."""

    subject = "attention"
    kind = "attention"
    default = ("burst", "all-gather", "deepspeed-ulysses")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (reason := gate.refusal(self)) is not None:
            raise ValueError(reason)

    @classmethod
    def named(cls, device: str) -> Mapping[str, AttentionCase]:
        return {"1 rank": cls(ranks=1), "4 ranks": cls(ranks=4)}

    def prepare(self, world: World) -> Stage:
        kernel = on_first(world, partial(gate.bare_kernel(self), *self.tensors()))
        return Stage(partial(ring_trial, self, world), {"kernel": kernel})

    def derive(self, table: Table) -> Derived:
        for method in table.methods:
            yield method, "cpu / kernel", table.over((method, "cpu"), ("kernel", "cpu"))


def ring_trial(case: RingCase, world: World, method: Method) -> Trial:
    """Return a method of the kind "attention", behind the gate."""
    built: Attention = method.build(case, world)
    *local, dout = map(built.shard, case.tensors())

    def step() -> None:
        q, k, v = (x.detach().requires_grad_() for x in local)
        built.attend(q, k, v).backward(dout)

    def check() -> Mapping[str, float]:
        short = gate.gate_problem(case, world.size)
        assert isinstance(short, RingCase)
        return {"error": gate.error(short, method.build(short, world), world)}

    return Trial({"": step}, check=check, bound=gate.BOUND)


def on_first(world: World, run: Callable[[], object]) -> Trial:
    """Return a unit on rank 0 while the others wait asleep, so that it has a core to itself."""
    return Trial({"": run if world.rank == 0 else lambda: None})
