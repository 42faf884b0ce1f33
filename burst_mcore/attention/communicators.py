"""Which process group carries which messages of a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

Carrier = tuple[dist.ProcessGroup, Mapping[int, int]]
"""A process group, and the place in it of each rank of the ring that it reaches."""


class Communicators:
    """The process groups of one ring of ranks.

    On gloo messages are told apart by tag, so the groups that were given carry all. NCCL runs the messages of
    a communicator one after another: there, each kind of message on each link gets its own, made at the first
    call that needs it (by then the ranks have agreed on that call), so that all can be in flight at once.

    Args:
        ranks: global ranks in the order of the ring.
        given: by link ("whole", "intra", "inter"): the user's groups. They carry data.
        control: a gloo group over all, for the agreement at the start of a call.
    """

    def __init__(
        self, ranks: Sequence[int], given: Mapping[str, dist.ProcessGroup], control: dist.ProcessGroup
    ) -> None:
        self.control = control
        self.backends = dist.get_backend_config(next(iter(given.values())))  # such as "cpu:gloo,cuda:nccl"
        self._ranks = tuple(ranks)
        self._given = dict(given)
        self._made: dict[tuple[tuple[int, ...], str, str], Carrier] = {}

    def carrier(self, link: str, what: str, members: tuple[int, ...]) -> Carrier:
        """The group for messages of this kind on this link between `members` (ranks of the ring)."""
        key = (members, link, what)
        if key not in self._made:
            group = self._group(link, what, members)
            place = {world: at for at, world in enumerate(dist.get_process_group_ranks(group))}
            reached = {rank: place[world] for rank, world in enumerate(self._ranks) if world in place}
            self._made[key] = group, reached
        return self._made[key]

    def _group(self, link: str, what: str, members: tuple[int, ...]) -> dist.ProcessGroup:
        given = self._given.get(link)
        if given is None and link != "heads" and len(members) == len(self._ranks):
            given = self._given.get("whole")
        if "cuda:nccl" not in self.backends:
            return given or self._given.get("whole", self.control)
        if given is not None and what == "data":
            return given
        return companion([self._ranks[rank] for rank in members], "nccl")


def companion(ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    """A new communicator over these global ranks. Collective over them, not over the world."""
    made = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    if backend == "nccl":
        # A communicator starts lazily; start it here, not inside the first hop.
        dist.barrier(made, device_ids=[torch.cuda.current_device()])
    return made
