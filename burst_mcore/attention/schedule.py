"""The ring as data: what each rank does, in order, as actions on named buffers.

One object is printed as a step x rank grid, verified, costed (`cost`) and executed (`ring`). Forward and both
backward directions differ only in which bundle travels and whether its gradient follows it:

    forward          K, V travel, nothing follows     (paper algorithm 4)
    backward "kv"    K, V travel, dK, dV follow       (paper algorithm 1, RingAttention)
    backward "query" Q, dO, D, LSE travel, dQ follows (paper algorithm 2, BurstAttention)

Bundles go from rank r to r + 1; after t hops rank r holds that of rank r - t. The data of step t + 1 is on
its way while step t is computed. The gradient of a bundle follows one step behind it: it leaves a rank once
that rank's share has been added, so that it makes G hops and ends at home, where data makes G - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

DATA, GRADIENT = "data", "gradient"
HOME = "home"


@dataclass(frozen=True)
class Send:
    """Start sending `buffer` to rank `peer`; it may be read, but not written, until the channel's Wait."""

    step: int
    channel: str
    buffer: str
    peer: int

    def __str__(self) -> str:
        return f"{self.buffer}>{self.peer}"


@dataclass(frozen=True)
class Recv:
    """Start receiving from rank `peer` into `buffer`; it may not be touched until the channel's Wait."""

    step: int
    channel: str
    buffer: str
    peer: int

    def __str__(self) -> str:
        return f"{self.buffer}<{self.peer}"


@dataclass(frozen=True)
class Wait:
    """Everything started on `channel` is complete."""

    step: int
    channel: str

    def __str__(self) -> str:
        return f"wait {self.channel}"


@dataclass(frozen=True)
class Compute:
    """Attend this rank's own tensors to the bundle of rank `source`, which lies in `buffer`."""

    step: int
    source: int
    buffer: str

    def __str__(self) -> str:
        return f"[{self.source}]"


@dataclass(frozen=True)
class Accumulate:
    """Add the gradients of the last Compute to the travelling sum in `buffer`; the `first` share is set."""

    step: int
    source: int
    buffer: str
    first: bool

    def __str__(self) -> str:
        return f"{self.buffer}{'=' if self.first else '+='}d[{self.source}]"


Action = Send | Recv | Wait | Compute | Accumulate
Program = tuple[Action, ...]


def data_buffer(step: int) -> str:
    """Where the bundle of `step` lies: the caller's own tensors first, then two buffers in turn."""
    return HOME if step == 0 else f"data{(step - 1) % 2}"


def sum_buffer(step: int) -> str:
    """Where the travelling gradient of the bundle of `step` lies."""
    return f"sum{step % 2}"


def home_sum(size: int) -> str:
    """Where a rank's own gradient has arrived, complete, when its program ends."""
    return sum_buffer(size if size > 1 else 0)


@lru_cache(maxsize=64)
def flat_ring(rank: int, size: int, *, gradients: bool) -> Program:
    """The program of `rank` on one ring of `size` ranks; `gradients` says whether they follow the data."""
    to, source_rank = (rank + 1) % size, (rank - 1) % size
    program: list[Action] = []
    for step in range(size):
        source, last = (rank - step) % size, step == size - 1
        if not last:
            program += [
                Recv(step, DATA, data_buffer(step + 1), source_rank),
                Send(step, DATA, data_buffer(step), to),
            ]
        program.append(Compute(step, source, data_buffer(step)))
        if gradients:
            if step > 0:
                program.append(Wait(step, GRADIENT))
            program.append(Accumulate(step, source, sum_buffer(step), first=step == 0))
            if size > 1:
                program += [
                    Recv(step, GRADIENT, sum_buffer(step + 1), source_rank),
                    Send(step, GRADIENT, sum_buffer(step), to),
                ]
        if not last:
            program.append(Wait(step, DATA))
    if gradients and size > 1:
        program.append(Wait(size, GRADIENT))
    return tuple(program)


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks: to print and to verify. A rank executes its own, `flat_ring`."""

    name: str
    programs: tuple[Program, ...]

    @property
    def size(self) -> int:
        return len(self.programs)

    def __str__(self) -> str:
        """A grid, a row a step and a column a rank: x<r receives from rank r, x>r sends, [r] computes."""
        cells = [
            {
                step: "  ".join(map(str, actions))
                for step, actions in groupby(program, key=lambda action: action.step)
            }
            for program in self.programs
        ]
        steps = sorted({step for column in cells for step in column})
        header = ["step", *(f"rank {rank}" for rank in range(self.size))]
        rows = [header, *([str(step), *(column.get(step, "") for column in cells)] for step in steps)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([f"{self.name}, {self.size} ranks", *lines])


def forward_schedule(size: int) -> Schedule:
    """K, V travel; nothing follows."""
    return Schedule(
        "forward: K, V travel", tuple(flat_ring(rank, size, gradients=False) for rank in range(size))
    )


def backward_schedule(size: int, direction: str) -> Schedule:
    """Backward by rotating the queries ("query") or the keys and values ("kv")."""
    travels = {
        "query": "backward query: Q, dO, D, LSE travel, dQ follows",
        "kv": "backward kv: K, V travel, dK, dV follow",
    }
    return Schedule(travels[direction], tuple(flat_ring(rank, size, gradients=True) for rank in range(size)))
