"""METHODS: everything that is compared, by the kind of thing that a method does, and its name.

    attention   attends over a sharded sequence
    heads       LM heads with their loss
    layers      ways to checkpoint the layers of a model
    kernels     local attention kernels
    played      attention on a cluster as programs, without kernels

`sharded` is the form of the first kind, `all_gather` its baseline, `peers` has its methods of other projects.
`virtual_rank` is one rank of a ring, alone on a device, for the subject virtual-ring.
`steps_deepspeed` and `steps_megatron` have the training steps of a framework, for the subject step; `steps`
has what they share. `bare` calls a kernel with nothing around it.

A new method is a row in one of these files, and is measured by every subject of its kind.
"""

from burst_bench.core import Method
from burst_bench.methods.attention import METHODS as ATTENTION
from burst_bench.methods.heads import METHODS as HEADS
from burst_bench.methods.kernels import METHODS as KERNELS
from burst_bench.methods.layers import METHODS as LAYERS
from burst_bench.methods.played import METHODS as PLAYED

_KINDS = {
    "attention": ATTENTION, "heads": HEADS, "layers": LAYERS, "kernels": KERNELS,
    "played": PLAYED,
}  # fmt: skip
METHODS: dict[str, dict[str, Method]] = {
    kind: {method.name: method for method in methods} for kind, methods in _KINDS.items()
}
"""By kind and name."""

__all__ = ["METHODS"]
