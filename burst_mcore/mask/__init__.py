"""Masks: which tokens attend to which, over the whole sequence, whatever its layout.

terms    windows, strides, documents, blocks, ranges, chunks, images, trees: a mask intersects terms
mask     Mask, the class that users build, and unions of masks
bands    rectangles between two diagonals, to which terms are lowered for planning
tables   checks of the lists and tensors that describe masks
"""

from burst_mcore.mask.mask import SLICES, Mask

__all__ = ["SLICES", "Mask"]
