"""Masks: which tokens attend to which, over the whole sequence, however it is dealt to ranks.

terms    windows, strides, documents, blocks, ranges: what a mask is the intersection of
mask     Mask itself, as users build it
bands    what terms are lowered to for planning
tables   checks of what users describe masks with
words    masks in words, for command lines: "causal & documents:random,64"
"""

from burst_mcore.mask.mask import SLICES, Mask

__all__ = ["SLICES", "Mask"]
