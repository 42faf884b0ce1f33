"""Which process group carries which messages of a ring."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from burst_mcore.agreement import Agreement, Latest
from burst_mcore.digest import digest

_NEVER_SENT = 2**31 - 1
"""A tag of no message."""
CTAS_OF_CARD = 4
"""Thread blocks of a GPU with which NCCL fills a network card of 400 Gb/s: an estimate, not measured."""

Carrier = tuple[dist.ProcessGroup, Mapping[int, int]]
"""A process group, and the place in it of each rank of the ring that it reaches."""


class Communicators:
    """The process groups of one ring of ranks.

    On gloo messages are told apart by tag, so the user's groups carry all where they reach. NCCL runs the
    messages of a communicator one after another. So there each kind of message on each link gets a
    communicator of its own, and all kinds can be in flight at once, on streams of high priority. None is the
    user's: collectives of the model would come between. The first call that needs a communicator makes it,
    after the ranks have agreed on that call; a forward makes those of its backward as well.

    Args:
        ranks: global ranks in the order of the ring.
        groups: the user's groups, by link ("whole", "intra", "inter").
        control: a gloo group over all, for the agreement at the start of a call. Nothing else may use it: the
            thread of the agreement makes collectives while the user makes his own.
    """

    def __init__(
        self, ranks: Sequence[int], groups: Mapping[str, dist.ProcessGroup], control: dist.ProcessGroup
    ) -> None:
        self.control = control
        self.backends = dist.get_backend_config(next(iter(groups.values())))  # such as "cpu:gloo,cuda:nccl"
        self._timeout = timeout_of(next(iter(groups.values())))
        self.ranks = tuple(ranks)
        self._groups = dict(groups)
        self._made: dict[tuple[tuple[int, ...], str, str, int], Carrier] = {}
        self._own = [control]
        """The groups that nobody but the ring uses."""
        self.agreement: Agreement | None = None
        """Made by the first call: see `operator.agree`."""
        self.transports = Latest()
        """By ranks of a node and route: see `executor.transport_of`."""
        self.abandoned: list[object] = []
        """See `executor.Transport`."""

    def reach(self, device: torch.device) -> bool:
        """Return whether messages can be sent from and received in memory of this device."""
        backend = {"cpu": "cpu:gloo", "cuda": "cuda:nccl"}.get(device.type)
        return backend is not None and backend in self.backends

    def carrier(self, link: str, kind: str, members: tuple[int, ...], max_ctas: int) -> Carrier:
        """Return the group for messages of a kind on a link between `members`, ranks of the ring.

        max_ctas: thread blocks of a GPU that NCCL may use for it.
        """
        key = (members, link, kind, max_ctas)
        if key not in self._made:
            group = self._group(link, members, max_ctas)
            place = {world: index for index, world in enumerate(dist.get_process_group_ranks(group))}
            reached = {rank: place[world] for rank, world in enumerate(self.ranks) if world in place}
            self._made[key] = group, reached
        return self._made[key]

    @property
    def destroyed(self) -> bool:
        """Whether a process group of the ring is gone."""
        return not all(map(exists, (self.control, *self._groups.values())))

    def abort(self) -> None:
        """End every wait of this process for messages of the ring. The groups are of no use afterwards.

        NCCL's waits never come back to the host: its communicators are aborted.
        """
        for group, _ in list(self._made.values()):
            group.abort() if dist.get_backend(group) == "nccl" else _disconnect(group)

    def close(self) -> None:
        """Stop the agreement's thread and destroy the groups that were made here."""
        if self.agreement is not None:
            self.agreement.close()
        _disconnect(self.control)  # else exchanges that a rank has left end with the group's time-out
        for group in filter(exists, self._own):
            dist.destroy_process_group(group)
        for kept in (self.abandoned, self._own, self._made, self.transports, self._groups):
            kept.clear()  # the connections of a group end with the last reference to it

    def _group(self, link: str, members: tuple[int, ...], max_ctas: int) -> dist.ProcessGroup:
        ranks = [self.ranks[rank] for rank in members]
        if "cuda:nccl" in self.backends:
            most = min(max_ctas, CTAS_OF_CARD) if link == "inter" else max_ctas
            made = companion(ranks, "nccl", self._timeout, most)
        else:
            users = self._groups.get(link) or self._groups.get("whole")
            if users is not None:
                return users
            made = companion(ranks, "gloo", self._timeout)
        self._own.append(made)
        return made


def _disconnect(group: dist.ProcessGroup) -> None:
    """End all waits of a gloo group, which has no abort: a receive that is late closes a connection."""
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):  # it always times out
            group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def exists(group: dist.ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed."""
    return group in c10d._world.pg_map


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
