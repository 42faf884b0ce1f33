"""Process groups that the package makes for itself, over some ranks of the user's groups."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from burst_mcore.words import digest


def companion(
    ranks: Sequence[int], backend: str, timeout: timedelta, max_ctas: int = 8, *, priority: bool = True
) -> dist.ProcessGroup:
    """Make a communicator over these global ranks. Collective over them, not over the world.

    Args:
        ranks: in the order of the communicator.
        backend: "gloo" or "nccl".
        timeout: how long it waits for its ranks.
        max_ctas: thread blocks of a GPU that NCCL may use for it.
        priority: NCCL's messages do not queue behind compute.
    """
    options: Any = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
        options._timeout = timeout
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas  # by itself NCCL's least may be more
    with _made_by_members_alone(ranks):
        made = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )
    assert isinstance(made, dist.ProcessGroup)
    if backend == "nccl":
        start(made)
    return made


def start(group: dist.ProcessGroup) -> None:
    """Start an NCCL communicator, lazy by itself: here, not in a first hop that some ranks do not make."""
    dist.barrier(group, device_ids=[torch.cuda.current_device()])


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a process group waits for its ranks."""
    device = "cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu"
    timeout = group._get_backend(torch.device(device)).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


_TIMES: WeakKeyDictionary[Any, Counter[object]] = WeakKeyDictionary()
"""By default group: a process that takes the place of one that died was in no earlier one."""


def times(key: object) -> int:
    """Return how often this was called with `key` since the default process group was made: 1 at first."""
    counted = _TIMES.setdefault(dist.group.WORLD or dist, Counter())
    counted[key] += 1
    return counted[key]


_OF_THREAD = threading.local()
"""The name of the next group of a thread, where we give it one."""


@contextlib.contextmanager
def _made_by_members_alone(ranks: Sequence[int]) -> Iterator[None]:
    """Let torch make a group for which no other rank comes, under one name on all its members.

    torch names such a group after its ranks and the number of groups that the process is in. Where members
    are in different numbers of groups they wait for each other under different names, for ever. Our names
    follow from the ranks and how many we made of them. To be removed when torch's name
    (distributed_c10d._hash_ranks_to_str) depends on what all members have in common.

    A default group that is bound to a device would be split, which is collective over all its ranks. So for
    the while it is not bound.
    """
    key, world = tuple(sorted(ranks)), dist.group.WORLD
    _let_threads_name_groups()
    _OF_THREAD.name = c10d.GroupName(f"burst_mcore_{digest(repr((key, times(key))))}")
    device = None if world is None else world.bound_device_id
    try:
        if world is not None and device is not None:
            world.bound_device_id = None
        yield
    finally:
        del _OF_THREAD.name
        if world is not None and device is not None:
            world.bound_device_id = device


def _let_threads_name_groups() -> None:
    """Replace torch's naming of groups, once. Other threads, and other groups, get torch's names."""
    original = c10d._process_group_name
    if hasattr(original, "replaces"):
        return

    def name_of(ranks: Sequence[int], use_hashed_name: bool) -> c10d.GroupName:
        own: c10d.GroupName | None = getattr(_OF_THREAD, "name", None)
        return original(ranks, use_hashed_name) if own is None else own

    name_of.replaces = original  # type: ignore[attr-defined]
    c10d._process_group_name = name_of
