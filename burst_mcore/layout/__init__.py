"""Layouts: which rank holds which tokens of a sequence, and the tensors sharded so.

kinds     the ways to share out tokens, a class each: contiguous, zigzag, striped, ...; ranges of tokens
layout    Layout, the value that names a kind with its parameters; shard, unshard, positions
balance   how many pairs of a mask each rank would compute, and the layout that evens them out
"""

from burst_mcore.layout.kinds import KINDS, NAMES, joined
from burst_mcore.layout.layout import Layout, positions, shard, unshard

__all__ = ["KINDS", "NAMES", "Layout", "joined", "positions", "shard", "unshard"]
