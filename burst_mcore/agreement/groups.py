"""`Group`, the agreement of the ranks of a process group of the caller's, and integers of its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from burst_mcore.agreement.agreement import ALONE, Agreed, Agreement, word_of
from burst_mcore.agreement.claims import Claim, OthersError, numbers_of

T = TypeVar("T")


class Group(Agreement):
    """The agreement of the ranks of a caller's process group: meetings and refusals are its collectives."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._exchange = partial(integers_of, group, device=device)

    def meet(self, claim: Claim) -> Agreed:
        numbers = numbers_of(self._exchange(word_of(claim)), claim, self._exchange, "ranks", self._ranks)
        return Agreed(lengths=tuple([first for first, *_ in numbers]), numbers=numbers)

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # an interrupt waits for nobody
            text = str(error) or type(error).__name__
            text = text if isinstance(error, OthersError) else f"rank {dist.get_rank()}: {text}"
            with contextlib.suppress(OthersError):
                self.meet(Claim({}, error=text))


def agreement_over(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Agreement:
    """Return the agreement of the ranks of a caller's group; None: of this rank alone. device: of NCCL."""
    return ALONE if group is None or group.size() == 1 else Group(group, device)


def on_all_ranks(do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return `do()`, if it succeeds on every rank of a group, by default of all. Collective over them.

    `do` may itself be collective over a group of ranks, if it fails on all of them or on none.

    Raises:
        OthersError: `do` failed on other ranks only. A rank on which it failed raises its own error.
    """
    agreement = agreement_over(group or dist.group.WORLD)
    with agreement.refusing():
        result = do()
    agreement.meet(Claim({}))
    return result


def check_equal(name: str, value: Any) -> None:
    """Raise OthersError on all ranks if their values of this name print differently. Collective."""
    agreement_over(dist.group.WORLD).meet(Claim({name: str(value)}))


def integers_of(
    group: dist.ProcessGroup, mine: Sequence[int], device: torch.device | None = None
) -> list[list[int]]:
    """Return the integers of every rank of a group, by rank; all give as many. Collective over the group.

    Args:
        device: where NCCL finds the integers, by default the current GPU; other backends use the CPU.
    """
    nccl = dist.get_backend(group) == "nccl"
    row = torch.tensor([*mine], dtype=torch.int64, device=(device or "cuda") if nccl else "cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    table: list[list[int]] = torch.stack(rows).tolist()
    return table
