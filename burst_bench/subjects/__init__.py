"""SUBJECTS: everything that can be measured, by name."""

from burst_bench.core import Case
from burst_bench.subjects.attention import AttentionCase
from burst_bench.subjects.hops import HopsCase
from burst_bench.subjects.kernels import KernelCase
from burst_bench.subjects.loss import HeadCase
from burst_bench.subjects.masks import MaskCase
from burst_bench.subjects.offload import OffloadCase
from burst_bench.subjects.paper import PaperCase
from burst_bench.subjects.planning import PlanCase
from burst_bench.subjects.recompute import LayersCase
from burst_bench.subjects.rowwise import RowCase
from burst_bench.subjects.step import StepCase
from burst_bench.subjects.topology import ClusterCase
from burst_bench.subjects.virtual_ring import VirtualCase

_ALL: tuple[type[Case], ...] = (
    AttentionCase, MaskCase, ClusterCase, PaperCase, PlanCase, HeadCase, LayersCase, StepCase, KernelCase,
    RowCase, HopsCase, VirtualCase, OffloadCase,
)  # fmt: skip
SUBJECTS = {case.subject: case for case in _ALL}

__all__ = ["SUBJECTS"]
