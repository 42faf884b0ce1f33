"""The passes around the kernels on one device: GB/s of the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from burst_bench.core import Derived, Stage, Table, Trial, World
from burst_bench.methods.kernels import SquareCase
from burst_mcore.attention.numerics.rowwise import add_up, combine, output_stand_in, row_delta

BYTES = {
    "D": (4, 4),
    "stand-in for O": (4, 4),
    "merge of 8": (18, 36),
    "sum of 8": (18, 0),
    "sum in float32": (10, 0),
}
"""Of a row of 16 bits, that each pass must move: for each element, and besides."""


@dataclass(frozen=True, kw_only=True)
class RowCase(SquareCase):
    """The passes around attention kernels: D, the stand-in for O, merging."""

    subject = "rowwise"
    own = tuple(BYTES)

    tokens: int = 32768

    @classmethod
    def named(cls, device: str) -> Mapping[str, RowCase]:
        return {"32768 tokens": cls()}

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
            of_element, besides = BYTES[method]
            size = (of_element * self.head_dim + besides) * self.tokens * self.heads
            yield method, "GB/s", [size / seconds / 1e9 for seconds in samples]
