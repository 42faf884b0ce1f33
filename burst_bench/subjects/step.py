"""A training step of a small model under Megatron, DeepSpeed or FSDP2, with one attention or another."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from burst_bench.core import Bar, Derived, Method, Stage, Table, TimedStep, Trial, World, of_kind, one_of
from burst_bench.memory import of_process, peak_meter
from burst_bench.methods import steps_deepspeed, steps_fsdp, steps_megatron
from burst_bench.methods.steps import Train, TrainedCase
from burst_mcore.attention.runtime import topology
from burst_plan.machines import MACHINES, machine_of

FRAMEWORKS = {"deepspeed": steps_deepspeed, "fsdp": steps_fsdp, "megatron": steps_megatron}
HOST_NAME = topology.host_name
WRONG = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.01}
"""The limit of the relative difference of a method's first loss from the model's in one process."""
SIDE = 512
"""Side of the square matrices whose product measures a core's peak."""
THEIRS = {"deepspeed": "ulysses", "fsdp": "torch", "megatron": "megatron"}
"""Prefixes of the names of a framework's methods."""


class StepCase(TrainedCase):
    """A training step of a small model under a framework, with ours and with what the framework has.

    Seconds, bytes and memory are the slowest rank's. MFU is the model's FLOPs over the FLOPs that ranks
    could do: by data sheet on a GPU, by a product of matrices in turn on a CPU.
    """

    subject = "step"
    devices = ("cpu", "cuda")
    joined = True
    repeats = 25

    framework: str = one_of("deepspeed", FRAMEWORKS)

    @classmethod
    def named(cls, device: str) -> Mapping[str, StepCase]:
        """Return a case for all methods, cases with indivisible heads, and a case of two nodes."""
        return {
            "8 heads, 4 ranks": cls(),
            "3 heads, 2 ranks": cls(ranks=2, heads=3, kv_heads=3, seq=1024),
            "1 K/V head, 4 ranks": cls(ranks=4, heads=4, kv_heads=1, seq=1024),
            "6 heads, 8 ranks": cls(ranks=8, heads=6, kv_heads=3, seq=1024),
            "2 nodes of 2 ranks": cls(nodes=2, seq=1024),
        }

    def methods(self) -> Sequence[Method]:
        return of_kind(self.framework)

    def prepare(self, world: World) -> Stage:
        node = world.rank * self.nodes // world.size
        topology.host_name = HOST_NAME if self.nodes == 1 else lambda: f"node {node}"
        framework = FRAMEWORKS[self.framework]
        framework.start(self, world)
        want = framework.first_loss(self, world)

        def trial(method: Method) -> Trial:
            train: Train = method.build(self, world)
            first = train()
            losses = {"first loss": first, "loss error": abs(first / want - 1)}
            return Trial(
                {"": _counted(train) if world.device == "cpu" else train},
                check=lambda: peak_meter(train, world.device) | losses,
                bound=WRONG[self.dtype],
            )

        if world.device == "cuda":
            name = machine_of(torch.cuda.get_device_name())
            peak = {} if name is None else {("device", "FLOP/s"): MACHINES[name].tflops * 1e12}
            return Stage(trial, facts=peak)
        square = torch.ones(SIDE, SIDE)
        return Stage(trial, {"product": Trial({"": lambda: square @ square})})

    def derive(self, table: Table) -> Derived:
        """Yield tokens a second, MFU, and seconds over the framework's fastest method, in turn."""
        peak = statistics.median(table.get(("device", "FLOP/s"), (0.0,)))
        if ("product", "wall") in table:
            peak = 2 * SIDE**3 / statistics.median(table["product", "wall"])
        measured = {m: walls for m, walls in table.column("wall").items() if m != "product"}
        for method, walls in measured.items():
            sequences = self.sequences(method)
            yield method, "tokens/s", [sequences * self.seq / wall for wall in walls]
            if peak:
                flops = sequences * self.flops / self.ranks
                yield method, "MFU", [flops / wall / peak for wall in walls]
        prefix = THEIRS[self.framework]
        rival = table.fastest([method for method in table.methods if method.startswith(prefix)])
        if rival is not None:
            for method in measured:
                fewer = self.sequences(rival) / self.sequences(method)
                ratios = table.over((method, "wall"), (rival, "wall"))
                yield method, f"wall / {prefix}", [fewer * ratio for ratio in ratios]

    def sequences(self, method: str) -> int:
        """Return the number of sequences in a method's step; seconds are compared per sequence."""
        return self.ranks if method == steps_megatron.OWN else 1

    def bars(self, device: str) -> Sequence[Bar]:
        if self.framework != "deepspeed" or self.nodes > 1:
            return ()
        return [Bar("auto's step over Ulysses'", "burst auto", "wall / ulysses", 1.05)]


def _counted(train: Train) -> TimedStep:
    """Return a step that reports the bytes which this process wrote in it, to sockets too."""

    def step() -> Mapping[str, float]:
        before = of_process("io", "wchar")
        train()
        return {"written": float(of_process("io", "wchar") - before)}

    return step
