"""Masks: which tokens attend to which, over the whole sequence, whatever its layout.

terms    windows, strides, documents, blocks, ranges: a mask is an intersection of terms
mask     Mask, the class that users build
bands    rectangles between two diagonals, to which terms are lowered for planning
tables   checks of the lists and tensors that describe masks
"""

from burst_mcore.mask.mask import SLICES, Mask

__all__ = ["SLICES", "Mask"]
