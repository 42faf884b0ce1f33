"""The process groups of a ring, by link and kind of message."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from burst_mcore.agreement.agreement import Ring
from burst_mcore.attention.runtime.companions import companion, timeout_of
from burst_mcore.latest import Latest

_NEVER_SENT = 2**31 - 1
"""A tag that no message has."""
CTAS_OF_CARD = 4
"""The thread blocks (CTAs) that NCCL needs to fill a 400 Gb/s network card: an estimate, not measured."""

Carrier = tuple[dist.ProcessGroup, Mapping[int, int]]
"""A process group, and the group rank of each ring rank in the group."""


class Communicators:
    """The process groups of one ring of ranks.

    Gloo matches messages by tag, so the user's groups carry all kinds of messages. NCCL runs the messages of
    a communicator one after another. So on NCCL each kind of message on each link has a communicator of its
    own, and all kinds can be in flight at once, on streams of high priority. The user's communicators are
    not used: collectives of the model would delay the messages. The first call that needs a communicator
    makes it, after the ranks have agreed on the call; a forward makes its backward's communicators, too.

    Args:
        ranks: global ranks in the order of the ring.
        groups: the user's groups, by link ("whole", "intra", "inter").
        control: a gloo group over all ranks, for the agreement at the start of a call. Exclusive: the
            agreement's thread runs collectives concurrently with the user's.
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
        """The private groups of the ring, destroyed by `close`."""
        self.agreement: Ring | None = None
        """Set by the first call: see `agree.agreement_of`."""
        self.transports = Latest()
        """Transports by (ranks of a node, route): see `executor.transport_of`."""
        self.abandoned: list[object] = []
        """See `executor.Transport`."""

    def carrier(self, link: str, kind: str, members: tuple[int, ...], max_ctas: int) -> Carrier:
        """Return the group for messages of a kind on a link between `members`, ranks of the ring."""
        key = (members, link, kind, max_ctas)
        if key not in self._made:
            group = self._group(link, members, max_ctas)
            place = {world: index for index, world in enumerate(dist.get_process_group_ranks(group))}
            places = {rank: place[world] for rank, world in enumerate(self.ranks) if world in place}
            self._made[key] = group, places
        return self._made[key]

    @property
    def destroyed(self) -> bool:
        """Whether a process group of the ring is gone."""
        return not all(map(c10d._world.pg_map.__contains__, (self.control, *self._groups.values())))

    def abort(self) -> None:
        """End every wait of this process for messages of the ring; the groups are unusable afterwards.

        NCCL communicators are aborted: the host has no other means to end their waits.
        """
        for group in filter(exists, [group for group, _ in list(self._made.values())]):
            group.abort() if dist.get_backend(group) == "nccl" else _disconnect(group)

    def close(self) -> None:
        """Stop the agreement's thread and destroy the private groups."""
        if self.agreement is not None:
            self.agreement.close()
        _disconnect(self.control)  # else pending exchanges would end only with the group's time-out
        for group in filter(exists, self._own):
            dist.destroy_process_group(group)
        for container in (self.abandoned, self._own, self._made, self.transports, self._groups):
            container.clear()  # the connections of a group end with the last reference to it

    def _group(self, link: str, members: tuple[int, ...], max_ctas: int) -> dist.ProcessGroup:
        ranks = [self.ranks[rank] for rank in members]
        if "cuda:nccl" in self.backends:
            ctas = min(max_ctas, CTAS_OF_CARD) if link == "inter" else max_ctas
            group = companion(ranks, "nccl", self._timeout, ctas)
        else:
            users = self._groups.get(link) or self._groups.get("whole")
            if users is not None:
                return users
            group = companion(ranks, "gloo", self._timeout)
        self._own.append(group)
        return group


def _disconnect(group: dist.ProcessGroup) -> None:
    """End all waits of a gloo group, which has no abort: a receive that times out closes a connection."""
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):  # it always times out
            group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def exists(group: dist.ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed."""
    return group in c10d._world.pg_map
