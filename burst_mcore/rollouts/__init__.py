"""Rollouts of one prompt as one packed row: shared tokens once, as a tree (docs/guides/rl.md).

folding   rollouts -> one row with its tree, labels and weights; statistics of tokens back to rollouts
trees     the tree of a row: depths, padding, the mask of a layer
columns   tree and weights as columns of a batch, for the forward of a prepared model
megatron  a forward of a Megatron model over such a row
"""

from burst_mcore.rollouts.folding import Folded, fold
from burst_mcore.rollouts.trees import tree_mask

__all__ = ["Folded", "fold", "tree_mask"]
