"""Errors of one rank are errors of all, before any rank waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from burst_mcore.agreement.agreement import Agreed, Agreement, Claim
from burst_mcore.agreement.groups import agreement_over
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.transformers.errors import RefusedError

T = TypeVar("T")


def agreed(agreement: Agreement, claim: Claim, name: str = "another rank") -> Agreed:
    """Return the meeting of the ranks with a claim, whose error is a RefusedError of this name."""
    try:
        return agreement.meet(claim)
    except ValueError as error:
        raise RefusedError(name, str(error)) from None


def meet(topology: Topology, sync_point: str, *numbers: int) -> list[list[int]]:
    """Return the numbers of all ranks of a sequence, which come to this sync point of their programs.

    The agreement of their ring is asked: a collective of the caller's own is never mistaken for it.

    Raises:
        RefusedError: named "another rank", on all of them, at once: some call burst at another sync point.
        RuntimeError: a rank has ended, or did not come within the group's time-out; says where it was last.
    """
    return [[*each] for each in agreed(agreement_of(topology), Claim({"at": sync_point}, numbers)).numbers]


def on_all_ranks(do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return `do()`, if it succeeds on every rank. Collective over all ranks, or over those of a group.

    `do` may itself be collective over a group of ranks, if it fails on all of them or on none.

    Raises:
        RefusedError: named "another rank": `do` failed on other ranks only.
        Exception: what `do` raised on this rank.
    """
    agreement = agreement_over(group or dist.group.WORLD)
    with agreement.refusing():
        result = do()
    agreed(agreement, Claim({}))
    return result


def refuse_differences(name: str, value: Any) -> None:
    """Raise RefusedError, named `name`, on all ranks, if their values print differently. Collective."""
    agreed(agreement_over(dist.group.WORLD), Claim({name: str(value)}), name)
