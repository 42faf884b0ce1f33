"""The CP groups, and the mpu that gives them to DeepSpeed, for ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from burst_mcore.wrap import around, wrap


class SequenceParallelUnit:
    """DeepSpeed's mpu for CP groups: consecutive ranks share a sequence, ZeRO shards over all ranks.

    It has no get_data_parallel_*, as DeepSpeed's own parallel_state_sp has none: then DeepSpeed takes the
    sequence-data group, all ranks, for ZeRO, and world / SP for batch sizes. Its model-parallel group is this
    rank alone, not the CP group: nothing is sharded as tensor parallelism shards it.
    """

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        groups = {first: dist.new_group([*range(first, first + size)]) for first in range(0, world, size)}
        singles = groups if size == 1 else {each: dist.new_group([each]) for each in range(world)}
        self.sequence: dist.ProcessGroup = groups[rank - rank % size]
        """The ranks that share sequences with this one."""
        kinds = {
            "sequence_parallel": self.sequence,
            "sequence_data_parallel": dist.new_group([*range(world)]),
            "model_parallel": singles[rank],
        }
        for kind, group in kinds.items():
            for name, value in (("group", group), ("world_size", group.size()), ("rank", group.rank())):
                setattr(self, f"get_{kind}_{name}", lambda value=value: value)

    def initialize_sequence_parallel(self, sequence_parallel_size: int) -> None:
        """Mark this kind of mpu for DeepSpeed; the groups are there already."""


@around
def _with_its_own_mpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of engines: ours take means, and plain engines are kept apart from the groups.

    Ours average gradients over all ranks, whatever the ZeRO stage. Left alone, DeepSpeed divides by all ranks
    where ZeRO-3 reduces by reduce-scatter, and elsewhere by the number of CP groups, as far as the size of a
    group is known to the engine and its optimizer. There a term of the loss that is equal on all ranks would
    count once for each rank of a group.

    DeepSpeed keeps the last mpu for the whole process (`deepspeed.utils.groups.mpu`): a plain engine made
    after, such as a teacher's, would divide its gradients by too few ranks.
    """
    from deepspeed.utils import groups

    mpu, last_mpu = kwargs.get("mpu"), groups.mpu
    if mpu is None and isinstance(last_mpu, SequenceParallelUnit):
        groups.mpu = None
    try:
        original(self, *args, **kwargs)
    finally:
        if mpu is None:
            groups.mpu = last_mpu
    if isinstance(mpu, SequenceParallelUnit):  # also where Accelerate makes the engine
        for part in (self, self.optimizer):
            if hasattr(part, "sequence_parallel_size"):
                part.sequence_parallel_size = 1


_UNITS: dict[int, tuple[Any, SequenceParallelUnit]] = {}
"""Units by size, with the world in which they were made."""


def unit_of(size: int) -> SequenceParallelUnit:
    """Return the unit of `size` ranks a sequence, made once in a world. Collective over the world."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    wrap(DeepSpeedEngine, "__init__", _with_its_own_mpu)
    world = dist.group.WORLD
    if size not in _UNITS or _UNITS[size][0] is not world:
        _UNITS[size] = world, SequenceParallelUnit(size)
    return _UNITS[size][1]
