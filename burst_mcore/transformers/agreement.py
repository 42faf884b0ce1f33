"""Errors of one rank are errors of all, before any rank waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from burst_mcore.agreement import Claim, claims_of, disagreement
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.transformers.errors import RefusedError

T = TypeVar("T")
MOST = 4
"""Ranks whose errors are named, at most."""


def meet(topology: Topology, place: str) -> None:
    """Return once all ranks of a sequence have come to this place of their programs. Collective over them.

    The agreement of their ring is asked: a collective of the caller's own is never mistaken for it.

    Raises:
        RefusedError: named "another rank", on all of them, at once: some call burst at another place.
        RuntimeError: a rank has ended, or did not come within the group's time-out; says where it was last.
    """
    agreement = agreement_of(topology)
    if agreement is None:
        return
    try:
        agreement.come_to(place)
    except ValueError as error:
        text = f"{error}. All ranks of a sequence must make the same calls"
        raise RefusedError("another rank", text) from None


def on_all_ranks(do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return `do()`, if it succeeds on every rank. Collective over all ranks, or over those of a group.

    `do` may itself be collective over a group of ranks, if it fails on all of them or on none.

    Raises:
        RefusedError: named "another rank": `do` failed on other ranks only.
        Exception: what `do` raised on this rank.
    """
    problem: Exception | None = None
    try:
        result = do()
    except Exception as error:  # of any kind: the others must not wait for this rank
        problem = error
    claims = _claims(Claim({}, None if problem is None else f"{problem}" or type(problem).__name__), group)
    if problem is not None:
        raise problem
    failed = [(rank, claim) for rank, claim in claims.items() if claim.error is not None]
    if failed:
        raise RefusedError("another rank", str(disagreement(dict(failed[:MOST]))))
    return result


def refuse_differences(name: str, mine: Any) -> None:
    """Raise RefusedError, named `name`, on all ranks, if their values print differently. Collective."""
    values = [claim.signature[name] for claim in _claims(Claim({name: str(mine)})).values()]
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise RefusedError(name, f"rank 0 has {values[0]}, rank {other} has {values[other]}")


def _claims(mine: Claim, group: dist.ProcessGroup | None = None) -> dict[int, Claim]:
    group = group or dist.group.WORLD
    return {0: mine} if group is None else claims_of([group], mine)
