"""Savings by masks: attention against its tiles called bare, against masked dense attention, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from burst_bench.core import Bar, Derived, Stage, Table, TimedStep, Trial, World
from burst_bench.methods.attention import RingCase
from burst_bench.methods.kernels import Tiles, both_ways
from burst_bench.subjects.attention import on_first, ring_trial
from burst_mcore import BurstConfig, shard
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement, Ranks
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import Kernel
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.layout.balance import imbalance, keys_per_query
from burst_mcore.rates import CPU
from burst_plan.explain.predict import draw
from burst_plan.explain.problem import DTYPES

SHORT = 3
"""Factor of the rounds for cases without masked dense attention, which takes the most time."""
ROOM = 32
"""Memory that a process takes before the measurement, in tensors of the whole sequence."""
DENSE_ROWS = 512
"""Query rows of a call of masked dense attention: its mask is as large as this times the sequence."""
DENSE_TOKENS = 8192
"""Most tokens of the unmasked kernel, whose time per pair is the unit."""


class MaskCase(RingCase):
    """CPU seconds of attention under masks, forward and backward, over gloo; bytes of the forward."""

    subject = "masks"
    kind = "attention"
    default = ("burst",)

    ranks: int = 2
    seq: int = 32768
    heads: int = 2
    dense: float | None = None
    """Least time of masked dense attention as a multiple; None: it is not measured."""
    ideal: float | None = None
    """The multiple if time were proportional to pairs."""
    per_pair: float | None = None
    """Most time per allowed pair over the dense kernel's."""

    @classmethod
    def named(cls, device: str) -> Mapping[str, MaskCase]:
        """Return the cases of the paper's table, and packed and sparse masks."""
        n = cls().seq
        window, dilated = f"window:{n // 8}", f"causal & dilated:{n // 8},4"
        documents = "causal & documents:" + ",".join(["8192"] * (n // 8192 - 1))  # the last has the rest
        packed = "causal & documents:random,64"
        return {
            "causal, zigzag": cls(dense=1.8, ideal=2.0),
            "window of 1/8, zigzag": cls(mask=window, dense=6.0, ideal=8.5),
            "window of 1/8, contiguous": cls(mask=window, layout="contiguous", dense=6.0, ideal=8.5),
            "documents of 8K, auto": cls(mask=documents, layout="auto", per_pair=1.15, rounds=SHORT),
            "documents of 8K, zigzag": cls(mask=documents, rounds=SHORT),
            "64 documents, auto": cls(seq=2 * n, mask=packed, layout="auto", rounds=SHORT),
            "blocks of 512, 1/4, auto": cls(mask="blocks:512,0.25", layout="auto", rounds=SHORT),
            "dilated by 4, zigzag": cls(mask=dilated, rounds=SHORT),
        }

    def prepare(self, world: World) -> Stage:
        kernel = choose("auto", self.on_kernel)
        tiles, short = bare_tiles(self, kernel), [x[:, :DENSE_TOKENS] for x in self.tensors()]
        n = short[0].shape[1]
        units = {
            "tiles, sharing": Trial({"": partial(run_bare, tiles[world.rank])}),
            "tiles": on_first(world, partial(run_bare, list(chain(*tiles)))),
            "dense kernel": on_first(world, partial(both_ways, kernel, Pattern((n, n)), *short)),
        }
        if self.dense is not None:
            units["masked dense"] = on_first(world, masked_dense(self, kernel))
        return Stage(partial(ring_trial, self, world), units, room=ROOM * self.tensors()[0].nbytes)

    def derive(self, table: Table) -> Derived:
        """Yield ratios to the units; and from the plan, the balance of the work and the sent bytes."""
        n = self.seq
        per_pair = min(n, DENSE_TOKENS) ** 2 / int(keys_per_query(self.seen, n).sum())
        for method in (m for m, meter in table if meter == "error"):
            ours = method, "cpu"
            yield method, "cpu / tiles", table.over(ours, ("tiles", "cpu"))
            yield method, "cpu / tiles, sharing", table.over(ours, ("tiles, sharing", "cpu"))
            yield method, "masked dense / this", table.over(("masked dense", "cpu"), ours)
            ratios = table.over(ours, ("dense kernel", "cpu"))
            yield method, "cpu a pair / dense", [ratio * per_pair for ratio in ratios]
        ranks = Ranks(self.ranks, self.ranks)
        drawing = draw(self, ranks, CPU, BurstConfig(ring="auto"), Pass.FORWARD, self.layout)
        width = 2 * self.heads * self.head_dim * DTYPES[self.dtype].itemsize
        yield "plan", "busiest / mean", [imbalance(self.sharded, self.seen, n, self.ranks)]
        for name, number in (("sent", 0), ("all-gather", 1)):
            yield "plan", name, [sum(bytes_[number] for bytes_ in drawing.sent.values())]
        yield "plan", "least", [drawing.plan.reading(of_queries=False).elsewhere * width]

    def bars(self, device: str) -> Sequence[Bar]:
        bars = [Bar("CPU over its tiles' called bare", "burst", "cpu / tiles", 1.10)]
        if self.dense is not None:
            bars.append(
                Bar("masked dense over it", "burst", "masked dense / this", self.dense, at_most=False)
            )
        if self.per_pair is not None:
            bars.append(Bar("per pair over dense kernel", "burst", "cpu a pair / dense", self.per_pair))
        if self.layout == "auto":
            bars.append(Bar("busiest rank over mean", "plan", "busiest / mean", 1.05))
        return bars


def bare_tiles(case: MaskCase, kernel: Kernel) -> list[list[Tiles]]:
    """Return for each rank the tiles of its queries with the keys of every rank."""
    layout, size = case.sharded, case.ranks
    plan, tensors = plan_of(layout, case.seen, case.seq, Placement(size)), case.tensors()
    shards = [[shard(x, 1, rank=rank, size=size, layout=layout) for x in tensors] for rank in range(size)]
    return [
        [
            Tiles(kernel, tiles_of(plan, rank, source, kernel.abilities), (q, k, v, dout))
            for source, (_, k, v, _) in enumerate(shards)
        ]
        for rank, (q, _, _, dout) in enumerate(shards)
    ]


def run_bare(several: Sequence[Tiles]) -> None:
    """Call the kernel for all tiles, forward and backward."""
    for tiles in several:
        tiles.both()


def masked_dense(case: MaskCase, kernel: Kernel) -> TimedStep:
    """Return attention of all queries to all keys with a mask on scores: the paper's "Attention Masking"."""
    q, k, v, dout = case.tensors()
    rows = torch.arange(case.seq)
    strips = [slice(first, first + DENSE_ROWS) for first in range(0, case.seq, DENSE_ROWS)]
    patterns = [Pattern.from_table(case.seen.allows(rows[strip], rows)) for strip in strips]

    def run() -> None:
        for strip, pattern in zip(strips, patterns, strict=True):
            both_ways(kernel, pattern, q[:, strip], k, v, dout[:, strip])

    return run
