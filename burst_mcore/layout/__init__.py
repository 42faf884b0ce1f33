"""Layouts: which rank holds which tokens of a sequence, and the tensors dealt so.

layout    Layout, its kinds by name, and shard, unshard, joined, positions
balance   how many pairs of a mask each rank would compute, and the layout that evens them out
"""

from burst_mcore.layout.layout import KINDS, NAMES, Layout, joined, positions, shard, unshard

__all__ = ["KINDS", "NAMES", "Layout", "joined", "positions", "shard", "unshard"]
