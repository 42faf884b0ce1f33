"""The maths around the kernels: merging partial outputs, summing gradients, row-wise passes.

merge            partial outputs and gradient sums
rowwise          passes over rows: D, merging, casts
rowwise_triton   the same as Triton kernels
"""
