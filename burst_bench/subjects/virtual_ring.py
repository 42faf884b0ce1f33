"""One rank's share of a ring on one device: compared with its kernel alone, and with all but its kernel."""

from __future__ import annotations

import timeit
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from burst_bench.calibrate import least
from burst_bench.core import Derived, Stage, Table, TimedStep, Trial, World, one_of
from burst_bench.methods.kernels import SquareCase, others
from burst_bench.methods.virtual_rank import VirtualRank
from burst_bench.subjects.kernels import WORK
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.mask import Mask
from burst_plan.explain.problem import DTYPES
from burst_plan.words import mask_of, shortened

CHOOSING_TOKENS = 8192
"""Tokens of the square on which kernels are compared, for the fastest."""


class VirtualCase(SquareCase):
    """One rank's share of a ring on one device, blocks by asynchronous copies."""

    subject = "virtual-ring"

    size: int = 8
    """Ranks of the ring; one of them is present."""
    tokens: int = 32768
    """Tokens of that rank."""
    direction: str = one_of("query", ("query", "kv"))
    latent: bool = False
    """Whether a latent rotates, in DeepSeek-V3's proportion to a head: a third of a key is the rope key."""

    @property
    def seen(self) -> Mask:
        """The mask over the tokens of all ranks."""
        return mask_of(self.mask, self.tokens * self.size)

    @property
    def square(self) -> SquareCase:
        """A small square with the mask in proportion, on which kernels are compared: a ring of one."""
        n = min(self.tokens, CHOOSING_TOKENS)
        mask = shortened(self.mask, self.tokens * self.size, n)
        return replace(self, size=1, tokens=n, mask=mask)

    def rank(self, kernel: str, device: str, works: bool = True) -> VirtualRank:
        head_dim, value_dim = self.dims
        share = Shard(
            batch=1, tokens=self.tokens, heads=self.heads, kv_heads=self.kv_heads, head_dim=head_dim,
            value_dim=value_dim, dtype=DTYPES[self.dtype],
            latent=(8 * head_dim // 3, head_dim // 3) if self.latent else None, latent_rotates=self.latent,
        )  # fmt: skip
        return VirtualRank(
            share, self.size, mask=self.seen, kernel=kernel, works=works,
            direction=Pass(self.direction), device=device,
        )  # fmt: skip

    def prepare(self, world: World) -> Stage:
        """Make a rank's passes, and the steps for comparison, all with the same kernel.

        The idle rank's kernel does nothing: its passes are all work but the kernel's. With it the host is
        ahead of the device, as with slow kernels.
        """
        kernel = fastest(self, world)
        rank, idle = self.rank(kernel, world.device), self.rank(kernel, world.device, works=False)
        result = rank.forward()
        backward = rank.bare(Pass(self.direction)).backward()
        units = {
            "kernel alone": Trial({"forward": rank.bare(Pass.FORWARD).forward, "backward": backward}),
            "around the kernels": Trial(
                {"forward": idle.forward, "backward": partial(idle.backward, result)}, ahead=True
            ),
        }
        ring = Trial({"forward": rank.forward, "backward": partial(rank.backward, result)})
        facts = {("kernel alone", "pairs"): float(rank.pairs)}
        for name, step in ring.steps.items():
            host = min(timeit.repeat(units["around the kernels"].steps[name], number=1))
            facts["burst", f"host {name} / step wall"] = host / self.size
            facts["burst", f"launches / step of {name}"] = launches(step, world) / self.size
        return Stage(lambda method: ring, units, facts=facts)

    def derive(self, table: Table) -> Derived:
        forward, backward = table.column("forward wall"), table.column("backward wall")
        sums = {name: [a + b for a, b in zip(forward[name], backward[name], strict=True)] for name in forward}
        for meter, seconds, one, other in (
            ("forward kernel / this", forward, "kernel alone", "burst"),
            ("kernel / this", sums, "kernel alone", "burst"),
            ("around kernels / whole", sums, "around the kernels", "burst"),
        ):
            yield "burst", meter, [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        flops = WORK["backward"] * self.flops(table["kernel alone", "pairs"][0])
        for name in ("burst", "kernel alone"):
            yield name, "backward TFLOP/s", [flops / seconds / 1e12 for seconds in backward[name]]


def fastest(case: VirtualCase, world: World) -> str:
    """Return the fastest of the other projects' kernels in both passes, on a small causal square."""
    tensors, square = case.square.tensors(world.device), case.square
    names = others(case, world.device)
    if not names:
        raise LookupError("no kernel of others is here")
    return min(names, key=lambda name: least(square.bare(KERNELS[name], tensors).both, world, repeats=5))


def launches(step: TimedStep, world: World) -> int:
    """Return the number of kernels that a GPU runs in a pass; on a CPU, of called operators."""
    cuda = world.device == "cuda"
    kinds = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=kinds) as trace:
        step()
        if cuda:
            torch.cuda.synchronize()
    return sum(e.count for e in trace.key_averages() if e.device_type.name == "CUDA" or "aten::" in e.key)
