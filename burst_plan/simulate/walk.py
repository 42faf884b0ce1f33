"""Advances the programs of all ranks, each until its next action has to wait: for dry runs and simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from burst_mcore.attention.schedule.actions import Action, Program


class Walker(Protocol):
    """The position of a rank in its program."""

    program: Program
    executed: int
    """Actions that were executed."""


Rank = TypeVar("Rank", bound=Walker)


def walk(
    ranks: Sequence[Rank],
    execute: Callable[[Rank, Action], bool],
    tick: Callable[[], Iterable[Rank] | None],
) -> list[Rank]:
    """Run all programs, and return the deadlocked ranks: those that never reach their end.

    Args:
        ranks: the ranks, at the beginning of their programs.
        execute: executes the next action of a rank, or returns False if the rank has to wait for it.
        tick: called when all ranks wait or have ended. It lets time pass and returns the ranks that may go
            on, or None if no event is left.
    """
    ready = deque(ranks)
    while True:
        while ready:
            rank = ready.popleft()
            while rank.executed < len(rank.program) and execute(rank, rank.program[rank.executed]):
                rank.executed += 1
        woken = tick()
        if woken is None:
            return [rank for rank in ranks if rank.executed < len(rank.program)]
        ready.extend(woken)
