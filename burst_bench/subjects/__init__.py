"""SUBJECTS: all subjects that can be measured, by name.

attention     one attention layer on ranks          masks      savings by masks
topology      an emulated cluster, in wall time     step       a training step under a framework
loss          the LM head and its loss
kernels       local attention kernels; "rowwise": passes around them; "messages": messages during them
recompute     checkpointing of layers on a ring, and as "offload" layers with results off the GPU
virtual_ring  one rank's share of a ring on one device
"""

from burst_bench.core import Case
from burst_bench.subjects.attention import AttentionCase
from burst_bench.subjects.kernels import KernelCase, MessagesCase, RowCase
from burst_bench.subjects.loss import HeadCase
from burst_bench.subjects.masks import MaskCase
from burst_bench.subjects.recompute import LayersCase, OffloadCase
from burst_bench.subjects.step import StepCase
from burst_bench.subjects.topology import ClusterCase
from burst_bench.subjects.virtual_ring import VirtualCase

_OF_MAKE_BENCH = AttentionCase, MaskCase, ClusterCase, HeadCase, LayersCase, StepCase
_OF_GPU_CHECK = KernelCase, RowCase, MessagesCase, VirtualCase, OffloadCase
SUBJECTS: dict[str, type[Case]] = {case.subject: case for case in (*_OF_MAKE_BENCH, *_OF_GPU_CHECK)}
