"""The passes around the kernels on one device: GB/s of the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from burst_mcore.attention.numerics.rowwise import add_up, combine, output_stand_in, row_delta
from burst_mcore.bench.core import Derived, Method, Stage, Subject, Table, Trial, World, column
from burst_mcore.bench.subjects.kernels import KernelCase


@dataclass(frozen=True, kw_only=True)
class RowCase(KernelCase):
    """Rows that a pass goes over."""

    tokens: int = 32768


BYTES: Mapping[str, Callable[[RowCase], int]] = {
    "D": lambda case: 4 * case.head_dim + 4,
    "stand-in for O": lambda case: 4 * case.head_dim + 4,
    "merge of 8": lambda case: 18 * case.head_dim + 36,
    "sum of 8": lambda case: 18 * case.head_dim,
    "sum in float32": lambda case: 10 * case.head_dim,
}
"""Of a row of 16 bits, that each pass must move."""


def _build(case: RowCase, world: World) -> None:
    """Do nothing: the stage makes the tensors, which all passes share."""


def _methods(case: RowCase) -> Mapping[str, Method]:
    return {name: Method(name, _build) for name in BYTES}


def _stage(case: RowCase, world: World) -> Stage:
    dout, out_t, *_ = case.tensors(world.device)
    lse, delta = torch.randn(1, case.heads, case.tokens, device=world.device), row_delta(dout, out_t)
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


def _derive(case: RowCase, table: Table) -> Derived:
    for method, samples in column(table, "wall").items():
        size = BYTES[method](case) * case.tokens * case.heads
        yield method, "GB/s", [size / seconds / 1e9 for seconds in samples]


def _cases(device: str) -> Mapping[str, RowCase]:
    return {"32768 tokens": RowCase()}


SUBJECT = Subject(
    name="rowwise",
    about="The passes around attention kernels: D, the stand-in for O, merging.",
    case=RowCase,
    cases=_cases,
    stage=_stage,
    kind="",
    methods=_methods,
    devices=("cpu", "cuda"),
    repeats=5,
    derive=_derive,
)
