"""What goes wrong on one rank goes wrong on all, before anybody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from burst_mcore.deepspeed.errors import RefusedError

T = TypeVar("T")


def on_all_ranks(do: Callable[[], T]) -> T:
    """`do()`, if it succeeds on every rank. Collective over all ranks.

    It may wait for a group of ranks only where what fails on one of them fails on all of them.

    Raises:
        RefusedError: named "another rank", where it failed on others only. Where it failed: what it raised.
    """
    problem: Exception | None = None
    try:
        found = do()
    except Exception as error:  # of any kind: the others must not wait for this rank
        problem = error
    words = _of_all_ranks(None if problem is None else f"{problem}" or type(problem).__name__)
    if problem is not None:
        raise problem
    wrong = [f"rank {rank}: {word}" for rank, word in enumerate(words) if word is not None]
    if wrong:
        raise RefusedError("another rank", "; ".join(wrong[:4]))
    return found


def refuse_differences(name: str, mine: Any) -> None:
    """RefusedError, named `name`, on all ranks, where their values print differently. Collective."""
    found = _of_all_ranks(mine if isinstance(mine, str) else repr(mine))
    other = next((rank for rank, word in enumerate(found) if word != found[0]), None)
    if other is not None:
        raise RefusedError(name, f"rank 0 has {found[0]}, rank {other} has {found[other]}")


def _of_all_ranks(mine: str | None) -> list[str | None]:
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
