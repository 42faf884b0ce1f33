"""Local attention kernels: one table, and a readable reference beside the fast ones.

kernel                the interface: problem, scores, inputs of backward
table                 all kernels by name, and the choice of one
aten, flash, te       kernels of torch, flash-attn and TransformerEngine
triton, triton_code   our own kernel, for any mask
reference             plain torch, slow and exact
packed                the convention of flash kernels: windows, and documents by cu_seqlens
blocks                lists of blocks for our own kernel
shapes, finite        what a kernel lacks: head dims and small tiles; NaN
"""
