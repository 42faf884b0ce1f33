"""The paper's comparison of attention, emulated: its cluster, its shapes, its lengths, in real processes.

Messages are real, between network namespaces over shaped links. A timed wait stands for a kernel, as long as
the cost model says for the paper's GPU. Bytes are fewer and the clock is slower than on the cluster, by the
same factors for all methods of a case. What is measured is thus the order of things: schedules and overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from burst_bench import emulate
from burst_bench.core import Bar, Derived, Method, Stage, Table, Trial, World
from burst_bench.methods.played import AUTO, FIELD, Played, PlayedCase, Scale, costed, play
from burst_mcore.attention.choose import AS_FAST
from burst_mcore.rates import Rates

TOKENS = (4096, 8192, 16384, 32768)
"""Tokens of a rank: 128K to 1M on the paper's 32 GPUs."""
PACE = 0.25
"""Seconds of a call here for each rank."""
CARRIED = 400e6
"""Bytes a second that this machine carries over all links together, with time to spare."""
HALF = "with half the NIC"
GROWS = "lead with half the NIC / lead"
WITHIN = 0.05
"""A method may be so far from its prediction."""
BEHIND = "this / fastest other"
PAPERS = {
    "zigzag ring": (53.10, 104.59),
    "double ring": (99.11, 145.39, 160.25, 140.69),
    "USP": (140.41, 166.84, 174.46, 181.70),
    "burst": (128.76, 163.28, 178.56, 187.74),
}
"""TFLOP/s a GPU in the paper's figure of attention, 32 GPUs, by TOKENS; out of memory where there is none."""
EVERY, OFF = "every method", "off / predicted"
"""The largest distance of any method from its prediction."""


class PaperCase(PlayedCase):
    """Attention of the paper's 14B model, forward and backward, of every method, on an emulated cluster.

    A timed wait takes the place of the kernel. Seconds are those of the cluster: measured ones are divided by
    the pace of the emulation.
    """

    subject = "paper"
    kind = "played"
    emulated = True
    repeats = 3
    options = ("cluster",)
    overall = (
        Bar("the lead grows", "auto", f"{TOKENS[0] // 1024}K tokens a GPU: {GROWS}", 1.0, at_most=False),
    )

    pace: float = 0.0
    """Seconds that the way of "auto" shall take here; 0: `PACE` for each rank, so that what
    the processes do besides counts for little."""
    largest: int = 2**18
    """Bytes here of the largest message, at most: see `CARRIED`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pace < 0:
            raise ValueError(f"pace must be 0 or some seconds, got {self.pace:g}")

    @property
    def rates(self) -> Rates:
        """The links as they are emulated."""
        model, scale = self.model, self.scale
        slower = 1 / (scale.bytes * scale.seconds)
        return Rates(intra=model.intra * slower, inter=model.inter * slower, compute=1.0)

    @property
    def scale(self) -> Scale:
        share = self.share
        most = max(*share.bundle_bytes(of_queries=True), *share.bundle_bytes(of_queries=False))
        pace = (self.pace or PACE * self.where.size) / costed(self, AUTO).seconds
        least = self.where.size * self.model.intra / pace / CARRIED
        return Scale(pace, max(most / self.largest, least))

    @classmethod
    def named(cls, device: str) -> Mapping[str, PaperCase]:
        """Return the paper's lengths, and the shortest and the longest with half the NIC."""
        cases = {f"{tokens // 1024}K tokens a GPU": cls(tokens=tokens) for tokens in TOKENS}
        for name, case in (*cases.items(),):
            if case.tokens in (TOKENS[0], TOKENS[-1]):
                cases[f"{name}, {HALF}"] = replace(case, nic=0.5)
        return cases

    def prepare(self, world: World) -> Stage:
        scale = self.scale

        def trial(method: Method) -> Trial:
            built: Played = method.build(self, world)
            sent = {f"{link} sent": size for link, size in built.sent(world.rank, self.where.intra).items()}

            def step() -> Mapping[str, float]:
                emulate.go_first()
                play(built.parts, scale)
                return sent

            return Trial({"": step}, check=lambda: {"predicted": built.predicted, "kernel": built.kernel})

        return Stage(trial)

    def derive(self, table: Table) -> Derived:
        """Yield measured seconds of the cluster beside predicted seconds."""
        pace, off = self.scale.seconds, []
        emulated = {m: [wall / pace for wall in walls] for m, walls in table.column("wall").items()}
        medians = {method: statistics.median(samples) for method, samples in emulated.items()}
        for method, samples in emulated.items():
            predicted, kernel = (table[method, meter][0] for meter in ("predicted", "kernel"))
            yield method, "emulated", samples
            yield method, "emulated / predicted", [seconds / predicted for seconds in samples]
            yield method, "exposed / emulated", [1 - kernel / seconds for seconds in samples]
            yield method, "TFLOP/s", [self.row.figure_of(seconds) for seconds in samples]
            papers = dict(zip(TOKENS, PAPERS.get(method, ()), strict=False))
            on_papers = self.cluster.lower() in ("4x8", "a800:4x8") and self.nic == 1
            if on_papers and self.tokens in papers:
                yield method, "paper's TFLOP/s", [papers[self.tokens]]
            off.append(abs(medians[method] / predicted - 1))
        if off:
            yield EVERY, OFF, [max(off)]
        for other in medians.keys() - {"auto"} if "auto" in medians else ():
            yield other, "this / auto", [medians[other] / medians["auto"]]
        if "auto" in medians and len(medians) > 1:
            rival = min(seconds for method, seconds in medians.items() if method != "auto")
            yield "auto", BEHIND, [medians["auto"] / rival]

    @classmethod
    def summary(cls, tables: Mapping[str, Table]) -> Derived:
        """Yield how the lead of "auto" over the fastest method of others grows with half the NIC."""
        behind = {name: table.medians("this / auto") for name, table in tables.items()}
        leads = {
            name: min(ratios[method] for method in FIELD if method in ratios)
            for name, ratios in behind.items()
            if FIELD.keys() & ratios.keys()
        }
        for name, lead in leads.items():
            half = f"{name}, {HALF}"
            if half in leads:
                yield "auto", f"{name}: lead", [lead]
                yield "auto", f"{name}, {HALF}: lead", [leads[half]]
                yield "auto", f"{name}: {GROWS}", [leads[half] / lead]

    def bars(self, device: str) -> Sequence[Bar]:
        bars = [
            Bar("the method that is furthest from its prediction", EVERY, OFF, WITHIN),
            Bar("auto over the fastest other method", "auto", BEHIND, AS_FAST),
        ]
        if self.tokens == TOKENS[-1] and self.nic == 1:
            bars.append(Bar("exposed communication of auto", "auto", "exposed / emulated", 0.05))
        return bars
