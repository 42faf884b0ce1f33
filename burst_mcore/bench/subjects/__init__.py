"""SUBJECTS: everything that can be measured, by name."""

from burst_mcore.bench.core import Subject
from burst_mcore.bench.subjects import (
    attention,
    kernels,
    loss,
    masks,
    planning,
    recompute,
    rowwise,
    topology,
    training,
    virtual_ring,
)

_MODULES = (
    attention, masks, topology, planning, loss, recompute, training, kernels, rowwise, virtual_ring,
)  # fmt: skip
SUBJECTS: dict[str, Subject] = {module.SUBJECT.name: module.SUBJECT for module in _MODULES}

__all__ = ["SUBJECTS"]
