"""The maths around the kernels: merging partial outputs, summing gradients, row-wise passes.

merge            sums over tiles: partial outputs, gradients, and their pending parts
latent           K and V of multi-latent attention, expanded from a rotating latent
rowwise          passes over rows: D, merges, sums
rowwise_triton   the same as Triton kernels
"""
