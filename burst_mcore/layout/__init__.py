"""Layouts: which rank holds which tokens of a sequence, and the tensors dealt so.

kinds     the ways to deal, a class each: contiguous, zigzag, striped, ...
layout    Layout, the value that names a kind with its parameters; shard, unshard, positions
balance   how many pairs of a mask each rank would compute, and the layout that evens them out
runs      the tokens of a rank as ranges
"""

from burst_mcore.layout.kinds import KINDS, NAMES
from burst_mcore.layout.layout import Layout, positions, shard, unshard
from burst_mcore.layout.runs import joined

__all__ = ["KINDS", "NAMES", "Layout", "joined", "positions", "shard", "unshard"]
