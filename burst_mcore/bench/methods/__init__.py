"""METHODS: everything that is compared, by the kind of thing that a method does, and its name.

    attention   attends over a sharded sequence
    heads       LM heads with their loss
    layers      ways to checkpoint the layers of a model
    steps       training steps under DeepSpeed
    kernels     local attention kernels

A new method is a row in one of these files, and is measured by every subject of its kind.
"""

from burst_mcore.bench.core import Method
from burst_mcore.bench.methods import attention, heads, kernels, layers, steps

METHODS: dict[str, dict[str, Method]] = {
    kind: {method.name: method for method in methods}
    for kind, methods in {
        "attention": attention.METHODS,
        "heads": heads.METHODS,
        "layers": layers.METHODS,
        "steps": steps.METHODS,
        "kernels": kernels.METHODS,
    }.items()
}
"""By kind and name."""

__all__ = ["METHODS"]
