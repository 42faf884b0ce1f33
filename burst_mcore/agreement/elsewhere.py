"""Collectives of other code: in which one an absent rank stands, and whether this rank began its part."""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Stand(NamedTuple):
    """A collective in which the main thread waits. Those of a group are numbered, alike on its ranks."""

    group: str
    number: int
    text: str
    """For instance "all_reduce at train.py:41"."""


def stand_of_main_thread() -> Stand | None:
    """Return the collective of torch.distributed that the main thread has called and that has not ended."""
    messages = ("send", "recv", "isend", "irecv", "batch_isend_irecv")  # which not all ranks of a group call
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in messages:
        return None
    name, group = frame.f_code.co_name, frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return None
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch."):
        frame = frame.f_back
    text = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    return Stand(group.group_name, _begun(group), text)


def never_joined(stand: Stand) -> bool:
    """Return whether this rank is of the group, and has begun fewer of its collectives."""
    return any(_begun(each) < stand.number for each in c10d._world.pg_names if each.group_name == stand.group)


def _begun(group: Any) -> int:
    """Return how many collectives of the group this rank has begun."""
    return int(group._get_sequence_number_for_group())
