"""Layouts: the tokens of a sequence on each rank, and sharded tensors.

kinds     the kinds of layouts, a class each: contiguous, zigzag, striped, ...; ranges of tokens
layout    Layout, the value of a kind with its parameters; shard, unshard, positions
balance   the query-key pairs of each rank under a mask, and the layout that balances them
"""

from burst_mcore.layout.kinds import KINDS, NAMES
from burst_mcore.layout.layout import Layout, positions, shard, unshard

__all__ = ["KINDS", "NAMES", "Layout", "positions", "shard", "unshard"]
