"""Masks: which tokens attend to which, over the whole sequence, whatever its layout.

terms    windows, strides, documents, blocks, ranges, chunks, images, trees, with checks of their arguments
mask     Mask, the class that users build, and unions of masks
bands    rectangles between two diagonals, to which terms are lowered for planning
"""

from burst_mcore.mask.mask import SLICES, Mask

__all__ = ["SLICES", "Mask"]
