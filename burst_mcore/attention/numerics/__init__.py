"""The maths around the kernels: merging partial outputs, summing gradients, row-wise passes.

merge            sums over tiles: partial outputs, gradients; the parts of rows that wait there
latent           K and V of multi-latent attention, made of what rotates
rowwise          passes over rows: D, merges, sums
rowwise_triton   the same as Triton kernels
"""
