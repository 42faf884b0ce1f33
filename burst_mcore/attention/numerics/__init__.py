"""The maths around the kernels: merging partial outputs, summing gradients, row-wise passes.

merge            sums over tiles: partial outputs, gradients
segments         the rows of a sum, and the parts that wait there
two_sets         merge: attention over two sets of keys, for callers
latent           K and V of multi-latent attention, made of what travels
rowwise          passes over rows: D, merges, sums
rowwise_triton   the same as Triton kernels
"""
