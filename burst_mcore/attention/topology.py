"""Process groups -> a ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """A ring of ranks and the communicators that it runs on. Build it with `single` or `from_group`."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """Carries data. None where there is nothing to communicate."""

    gradient_group: dist.ProcessGroup | None = None
    """Carries gradients, so that they do not queue behind data: on NCCL a communicator of its own."""

    control_group: dist.ProcessGroup | None = None
    """A CPU (gloo) communicator over the same ranks, for the agreement at the start of a call."""

    @classmethod
    def single(cls) -> Topology:
        """One rank: all of the sequence is here."""
        return cls(rank=0, size=1)

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> Topology:
        """The ring over `group`, in the order of its ranks.

        On NCCL the first call for a group is collective over the group: it makes a second communicator for
        gradients and a gloo one for agreement. Later calls return the same object, so it may stand in a
        forward, but build it once beforehand (with the model) to keep that first call out of the training.

        Raises:
            ValueError: not an initialised process group, or one that this rank is not in.
        """
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"Topology.from_group needs a torch.distributed process group that this rank is in, got "
                f"{group!r}; for all ranks pass torch.distributed.group.WORLD after init_process_group, "
                f"for one rank alone use Topology.single()"
            )
        known = _KNOWN.get(group.group_name)
        if known is None or known[0] is not group:  # names come again after destroy_process_group
            _KNOWN[group.group_name] = known = (group, cls._build(group))
        return known[1]

    @classmethod
    def _build(cls, group: dist.ProcessGroup) -> Topology:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size == 1:
            return cls(rank=rank, size=size)
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        gradient = companion(group, "nccl") if "cuda:nccl" in backends else group  # gloo tells them by tag
        control = group if "cpu:gloo" in backends else companion(group, "gloo")
        return cls(rank, size, group, gradient_group=gradient, control_group=control)


def companion(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """A new communicator over the same ranks. Collective over `group`, not over the world."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    if backend == "nccl":
        # A communicator starts lazily; start it here, not inside the first backward.
        dist.barrier(made, device_ids=[torch.cuda.current_device()])
    return made


_KNOWN: dict[str, tuple[dist.ProcessGroup, Topology]] = {}
