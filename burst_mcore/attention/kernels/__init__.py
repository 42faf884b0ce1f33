"""Local attention kernels: one table, and a readable reference beside the fast ones.

kernel                the interface: problem, scores, inputs of backward
table                 all kernels by name, and the choice of one
aten, flash, te       kernels of torch, flash-attn and TransformerEngine
triton, triton_code   our own kernel, for any mask
reference             plain torch, slow and exact
padding, small, finite, window, blocks   what a kernel lacks: head dims, small tiles, NaN, windows, blocks
"""
