"""One attention layer on ranks: each method's seconds, on CPUs compared with the bare kernel's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from burst_bench import gate
from burst_bench.core import Bar, Derived, Method, Stage, Table, Trial, World, one_of
from burst_bench.methods.attention import RingCase, ShardedAttention
from burst_plan.explain.problem import DTYPES

RING = 1.02
"""Most CPU seconds of a choice over RingAttention's schedule, if its bytes do not matter."""


class AttentionCase(RingCase):
    """Forward and backward of one attention layer over gloo; errors are multiples of the bare kernel's."""

    subject = "attention"
    kind = "attention"
    default = ("burst", "torch-gather", "deepspeed-ulysses")
    devices = ("cpu", "cuda")
    joined = True

    passes: str = one_of("fwd+bwd", ("fwd", "fwd+bwd"))

    @classmethod
    def named(cls, device: str) -> Mapping[str, AttentionCase]:
        return {"1 rank": cls(ranks=1), "4 ranks": cls(ranks=4)}

    def prepare(self, world: World) -> Stage:
        trial = partial(ring_trial, self, world, passes=self.passes)
        if world.device == "cuda" or not gate.takes_whole(self):  # the sequence may be too long for it
            return Stage(trial)
        tensors = self.tensors()[: 3 if self.passes == "fwd" else 4]
        return Stage(trial, {"kernel": on_first(world, partial(gate.bare_kernel(self), *tensors))})

    def derive(self, table: Table) -> Derived:
        for method in table.methods:
            for unit in ("kernel", "ring"):
                yield method, f"cpu / {unit}", table.over((method, "cpu"), (unit, "cpu"))

    def bars(self, device: str) -> Sequence[Bar]:
        """Return the bars of "auto" if fewer bytes gain nothing: on one node, or if kernels hide them."""
        if device != "cpu" or self.ranks == 1:
            return ()
        return [
            Bar(f"CPU seconds of {name} over the ring's", name, "cpu / ring", RING)
            for name in ("burst-auto", "burst-auto-hidden")
        ]


def ring_trial(case: RingCase, world: World, method: Method, passes: str = "fwd+bwd") -> Trial:
    """Return a method of the kind "attention", behind the gate."""
    built: ShardedAttention = method.build(case, world)
    *local, dout = shards(case, built, world)

    def step() -> None:
        q, k, v = (x.detach().requires_grad_() for x in local)
        out = built.attend(q, k, v)
        if passes == "fwd+bwd":
            out.backward(dout)

    def check() -> Mapping[str, float]:
        unit = 2 * world.size
        short = case.shortened(max(unit, min(case.seq, gate.TOKENS) // unit * unit))
        assert isinstance(short, RingCase)
        return {"error": gate.error(short, method.build(short, world), world)}

    return Trial({"": step}, check=check, bound=gate.BOUND)


def shards(case: RingCase, built: ShardedAttention, world: World) -> list[Tensor]:
    """Return this rank's q, k, v and dout; on a GPU random ones, since host memory may be too small."""
    if world.device == "cpu":
        return [built.shard(x) for x in case.tensors()]
    tokens = built.shard(torch.zeros(case.batch, case.seq, 1, 1)).shape[1]
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, tokens, n, case.head_dim) for n in heads]
    return [torch.randn(shape, device=world.device, dtype=DTYPES[case.dtype]) for shape in shapes]


def on_first(world: World, run: Callable[[], object]) -> Trial:
    """Return a unit on rank 0; the others sleep meanwhile, so that it has a core to itself."""
    return Trial({"": run if world.rank == 0 else lambda: None})
