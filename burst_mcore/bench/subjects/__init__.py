"""SUBJECTS: everything that can be measured, by name."""

from burst_mcore.bench.core import Subject
from burst_mcore.bench.subjects.attention import SUBJECT as ATTENTION
from burst_mcore.bench.subjects.hops import SUBJECT as HOPS
from burst_mcore.bench.subjects.kernels import SUBJECT as KERNELS
from burst_mcore.bench.subjects.loss import SUBJECT as LOSS
from burst_mcore.bench.subjects.masks import SUBJECT as MASKS
from burst_mcore.bench.subjects.offload import SUBJECT as OFFLOAD
from burst_mcore.bench.subjects.planning import SUBJECT as PLANNING
from burst_mcore.bench.subjects.recompute import SUBJECT as RECOMPUTE
from burst_mcore.bench.subjects.rowwise import SUBJECT as ROWWISE
from burst_mcore.bench.subjects.topology import SUBJECT as TOPOLOGY
from burst_mcore.bench.subjects.training import SUBJECT as TRAINING
from burst_mcore.bench.subjects.virtual_ring import SUBJECT as VIRTUAL_RING

_ALL = (
    ATTENTION, MASKS, TOPOLOGY, PLANNING, LOSS, RECOMPUTE, TRAINING, KERNELS, ROWWISE, HOPS,
    VIRTUAL_RING, OFFLOAD,
)  # fmt: skip
SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}

__all__ = ["SUBJECTS"]
