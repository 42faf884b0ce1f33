"""Local kernels on one device, the passes around them, and concurrent messages, all compared in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from burst_bench.core import Derived, Method, Stage, Table, Trial, World, one_of
from burst_bench.gate import relative
from burst_bench.methods.kernels import SquareCase, both_ways, others
from burst_mcore.attention.kernels.kernel import Kernel
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.numerics.rowwise import add_up, combine, output_stand_in, row_delta
from burst_mcore.attention.runtime.companions import companion
from burst_mcore.layout.balance import keys_per_query
from burst_plan.words import shortened

GATE_TOKENS = 256
WRONG = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.01}
"""The limit of a kernel's relative error against float64."""
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of the passes, in multiples of a forward's."""
OURS = "triton"


class KernelCase(SquareCase):
    """Local attention kernels on one device, in turn."""

    subject = "kernels"
    kind = "kernels"

    passes: str = one_of("forward", WORK)

    def prepare(self, world: World) -> Stage:
        tensors = self.tensors(world.device)

        def trial(method: Method) -> Trial:
            kernel: Kernel = method.build(self, world)
            calls = self.bare(kernel, tensors)
            start = time.perf_counter()
            figures = {"error": worst_error(kernel, self, world.device)}
            figures["first call wall"] = time.perf_counter() - start
            step = calls.backward() if self.passes == "backward" else getattr(calls, self.passes)
            return Trial(
                {"": step}, check=lambda: figures, bound=WRONG[self.dtype], ahead=self.passes != "both"
            )

        return Stage(trial)

    def derive(self, table: Table) -> Derived:
        """Yield TFLOP/s of each kernel, and the speed of ours over the best other's."""
        walls = table.column("wall")
        flops = WORK[self.passes] * self.flops(int(keys_per_query(self.seen, self.tokens).sum()))
        for method, samples in walls.items():
            yield method, "TFLOP/s", [flops / seconds / 1e12 for seconds in samples]
        rival = table.fastest(walls.keys() - {OURS})
        if rival is not None:
            yield OURS, "speed / best other", table.over((rival, "wall"), (OURS, "wall"))


def worst_error(kernel: Kernel, case: SquareCase, device: str) -> float:
    """Return the worst relative error over few tokens, against the reference kernel in float64."""
    n = min(case.tokens, GATE_TOKENS)
    short = replace(case, tokens=n, mask=shortened(case.mask, case.tokens, n))
    calls, errors = short.bare(kernel, short.tensors(device)), [0.0]
    for tile in calls.tiles:
        rows = calls.rows(tile)
        results = both_ways(kernel, tile.pattern, *rows)
        want = both_ways(KERNELS["reference"], tile.pattern, *(x.double() for x in rows))
        errors += map(relative, results, want)
    return max(errors)


PASS_BYTES = {
    "D": (4, 4),
    "stand-in for O": (4, 4),
    "merge of 8": (18, 36),
    "sum of 8": (18, 0),
    "sum in float32": (10, 0),
}
"""Bytes of a row in 16 bits that each pass must move: for each element, and in addition."""


class RowCase(SquareCase):
    """The passes around attention kernels: D, the stand-in for O, merging."""

    subject = "rowwise"

    tokens: int = 32768

    def methods(self) -> Sequence[Method]:
        return [Method(name) for name in PASS_BYTES]

    def prepare(self, world: World) -> Stage:
        out_t, _, _, dout = self.tensors(world.device)
        lse, delta = torch.randn(1, self.heads, self.tokens, device=world.device), row_delta(dout, out_t)
        parts = [(out_t.clone(), torch.randn_like(lse)) for _ in range(8)]
        outs, total = [out for out, _ in parts], dout.float()
        steps: dict[str, Callable[[], object]] = {
            "D": lambda: row_delta(dout, out_t),
            "stand-in for O": lambda: output_stand_in(dout, delta),
            "merge of 8": lambda: combine(parts, out_t, lse),
            "sum of 8": lambda: add_up(outs, out_t),
            "sum in float32": lambda: add_up((total, out_t), total),
        }
        return Stage(lambda method: Trial({"": steps[method.name]}, ahead=True))

    def derive(self, table: Table) -> Derived:
        for method, samples in table.column("wall").items():
            of_element, besides = PASS_BYTES[method]
            size = (of_element * self.head_dim + besides) * self.tokens * self.heads
            yield method, "GB/s", [size / seconds / 1e9 for seconds in samples]


class MessagesCase(SquareCase):
    """Attention while NCCL carries messages on the same GPU, beside attention alone."""

    subject = "messages"

    tokens: int = 8192
    ctas: int = 8
    """Thread blocks that NCCL may use for a communicator."""
    priority: bool = True
    """Whether messages are on streams of high priority."""
    communicators: int = 2
    """Number of messages, each of the size of K and V."""

    def methods(self) -> Sequence[Method]:
        return [Method("under way")]

    def prepare(self, world: World) -> Stage:
        tensors = self.tensors(world.device)
        calls = self.bare(KERNELS[others(self, world.device)[0]], tensors)
        block = torch.cat([x.flatten() for x in tensors[1:3]])
        pairs = [(block.clone(), torch.empty_like(block)) for _ in range(self.communicators)]
        groups = [
            companion([0], "nccl", timedelta(minutes=2), self.ctas, priority=self.priority)
            for _ in (pairs if block.is_cuda else ())
        ]

        def under_way(call: Callable[[], object]) -> None:
            works = post(groups, pairs)
            call()
            for work in works:
                work.wait()

        alone = Trial({"": calls.forward}, ahead=True)
        messages = Trial({"": partial(under_way, lambda: None)}, ahead=True)
        beside = Trial({"": partial(under_way, calls.forward)}, ahead=True)
        facts = {("messages", "sent"): float(self.communicators * block.nbytes)}
        return Stage(lambda method: beside, {"alone": alone, "messages": messages}, facts)

    def derive(self, table: Table) -> Derived:
        yield "under way", "this / alone", table.over(("under way", "wall"), ("alone", "wall"))
        size, walls = table["messages", "sent"][0], table.column("wall")
        yield "messages", "GB/s", [size / seconds / 1e9 for seconds in walls.get("messages", ())]


def post(groups: Sequence[dist.ProcessGroup], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[dist.Work]:
    """Send and receive a message of one process to itself by each group; return the work to wait for.

    On a CPU a message is a copy, at once: it has neither NCCL nor a group.
    """
    works: list[dist.Work] = []
    for group, (block, target) in zip(groups, pairs, strict=False):
        ends = (dist.irecv, target), (dist.isend, block)
        works += dist.batch_isend_irecv([dist.P2POp(op, x, group=group, group_peer=0) for op, x in ends])
    for block, target in () if groups else pairs:
        target.copy_(block)
    return works
