"""How ranks learn each other's claims: integers at every call, text where the integers differ.

`integers_of` is one all-gather, which every rank must reach. The waits of a `Gathering` can be ended: a rank
that waits looks for the error of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.agreement.claims import Claim

LOOK_EVERY = timedelta(seconds=1)
"""How often a waiting rank looks for the error of another."""


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


def claims_of(groups: Sequence[dist.ProcessGroup], claim: Claim) -> dict[int, Claim]:
    """Return the claims of all ranks that `groups` join, one group after another, by global rank, ascending.

    With a rank's tensor-parallel group and then its context-parallel group these are all ranks of the grid.
    Collective over each of the groups.
    """
    claims = {dist.get_rank(): claim}
    for group in groups:
        everyones: list[dict[int, Claim]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everyones, claims, group=group)
        claims = {rank: each for known in everyones for rank, each in known.items()}
    return dict(sorted(claims.items()))


class Gathering:
    """Exchanges by a gather to the first rank of a gloo group, and a broadcast from it; waits can be ended.

    The hub, first rank of the group, waits for all; the others wait for the hub. An all-reduce takes
    2 (G - 1) messages on gloo, one after another.

    Args:
        ranks: global ranks in the order of the ring; `rank` is this rank's place among them.
        absent: the integers that stand for a rank that does not come.
        look: raises the error that another rank has left for this exchange, if there is one.
        fail: tells the other ranks that the hub's wait ended with this error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        *,
        absent: Sequence[int],
        look: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._group, self._rank, self._absent = group, rank, tuple(absent)
        self._order = [dist.get_group_rank(group, each) for each in ranks]
        """Where the ranks of the ring stand in the group."""
        self._look, self._fail = look, fail

    def integers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, by its place on the ring.

        Raises:
            RuntimeError: another rank has gone, or did not come within the group's time-out.
            Exception: what `look` raised.
        """
        gathering, table = self._gather(mine)
        try:
            if self._order[self._rank] == 0:
                self._wait(gathering)
        except BaseException as error:  # the others have begun a broadcast
            self._fail(error)
            self._broadcast_absence()
            raise
        self._wait(gathering, self._broadcast(table))
        rows: list[list[int]] = table[self._order].tolist()
        return rows

    def stay_in_step(self) -> None:
        """Take part in an exchange that this rank did not come to; the others may have left it by now."""
        self._gather(self._absent)
        self._broadcast_absence()

    def gone(self, error: RuntimeError) -> RuntimeError:
        """Return the error of a rank that waited in vain."""
        return RuntimeError(
            f"on rank {self._rank} of {len(self._order)}: another rank of the ring has gone or did not come "
            f"to this call, before its first ring step; look for the first error among the others ({error})"
        )

    def _gather(self, mine: Sequence[int]) -> tuple[dist.Work, Tensor]:
        table = torch.empty(len(self._order), len(mine), dtype=torch.int64)
        rows = list(table.unbind()) if self._order[self._rank] == 0 else None
        work = dist.gather(torch.tensor([*mine]), rows, group=self._group, group_dst=0, async_op=True)
        assert isinstance(work, dist.Work)
        return work, table

    def _broadcast(self, table: Tensor) -> dist.Work:
        work = dist.broadcast(table, group=self._group, group_src=0, async_op=True)
        assert isinstance(work, dist.Work)
        return work

    def _broadcast_absence(self) -> None:
        """Broadcast a new table: a gather that nobody waits for may still write into its own."""
        self._broadcast(torch.tensor([self._absent] * len(self._order)))

    def _wait(self, *works: dist.Work) -> None:
        """Wait until the last is complete, `look` raises, or one of them has failed."""
        while not works[-1].is_completed() and not any(map(_failed, works)):
            try:
                works[-1].wait(LOOK_EVERY)
            except RuntimeError:  # LOOK_EVERY has passed, or the work failed and is complete
                self._look()
        try:
            for work in works:
                if work.is_completed():  # work that waits for a rank that is gone may never be
                    work.wait()
        except RuntimeError as error:
            self._look()  # a rank that has gone may have told why
            raise self.gone(error) from error


def _failed(work: dist.Work) -> bool:
    """Return whether the work has ended with an error."""
    try:
        if work.is_completed():
            work.wait()
    except RuntimeError:
        return True
    return False
