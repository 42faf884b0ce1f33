"""`Group`, the agreement of the ranks of a process group of the caller's, and integers of its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from burst_mcore.agreement.agreement import ALONE, Agreed, Agreement, Claim
from burst_mcore.agreement.claims import Told, numbers_of


class OthersError(ValueError):
    """The error of a `Group` on ranks that have none of their own, or that differ."""


class Group(Agreement):
    """The agreement of the ranks of a caller's process group: meetings and refusals are its collectives."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None) -> None:
        self._group, self._device = group, device

    def meet(self, claim: Claim) -> Agreed:
        words = integers_of(self._group, claim.word(), self._device)

        def claims() -> dict[int, Told]:
            everyones = [(claim.signature, claim.error)] * len(words)
            dist.all_gather_object(everyones, everyones[0], group=self._group)
            return dict(zip(dist.get_process_group_ranks(self._group), everyones, strict=True))

        try:
            numbers = numbers_of(words, claims)
        except ValueError as error:
            raise OthersError(*error.args) from None
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
