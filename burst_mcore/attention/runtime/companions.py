"""Private process groups, over some ranks of the user's groups."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from burst_mcore.words import digest
from burst_mcore.wrap import wrap


def companion(
    ranks: Sequence[int], backend: str, timeout: timedelta, max_ctas: int = 8, *, priority: bool = True
) -> dist.ProcessGroup:
    """Make a communicator over these global ranks: a collective over these ranks, not over the world.

    Args:
        ranks: in the order of the communicator.
        backend: "gloo" or "nccl".
        max_ctas: the thread blocks (CTAs) that NCCL may use.
        priority: use a high-priority stream, so that NCCL messages do not queue behind compute.
    """
    options: Any = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
        options._timeout = timeout
        options.config.min_ctas, options.config.max_ctas = 1, max_ctas  # NCCL's default minimum may be larger
    with _made_by_members_alone(ranks):
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )
    assert isinstance(group, dist.ProcessGroup)
    if backend == "nccl":  # lazy, and some ranks may have no first message that would start it
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time-out of a process group."""
    device = "cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu"
    timeout = group._get_backend(torch.device(device)).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


_TIMES: WeakKeyDictionary[Any, Counter[object]] = WeakKeyDictionary()
"""Counts by default process group: a restarted process has none of an earlier default group."""


def times(key: object) -> int:
    """Count and return the calls with `key` since the default process group was made: 1 at first."""
    counts = _TIMES.setdefault(dist.group.WORLD or dist, Counter())
    counts[key] += 1
    return counts[key]


_OF_THREAD = threading.local()
"""The name of a thread's next group, during `_made_by_members_alone`."""


@contextlib.contextmanager
def _made_by_members_alone(ranks: Sequence[int]) -> Iterator[None]:
    """Let torch make a group without the other ranks, under the same name on all members.

    torch names such a group after its ranks and the number of groups that the process is in. Members in
    different numbers of groups would wait for each other under different names, forever. Our names depend on
    the ranks and the number of our groups over them. To be removed when torch's name
    (distributed_c10d._hash_ranks_to_str) depends only on facts that all members share.

    A default group that is bound to a device would be split, a collective over all its ranks. So the binding
    is suspended meanwhile.
    """
    key, world = tuple(sorted(ranks)), dist.group.WORLD
    wrap(c10d, "_process_group_name", _named_by_thread)
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


def _named_by_thread(original: Callable[..., c10d.GroupName]) -> Callable[..., c10d.GroupName]:
    """Return torch's naming of groups with the name of this thread's next group, if it has one."""

    def name_of(ranks: Sequence[int], use_hashed_name: bool) -> c10d.GroupName:
        name: c10d.GroupName | None = getattr(_OF_THREAD, "name", None)
        return original(ranks, use_hashed_name) if name is None else name

    return name_of
