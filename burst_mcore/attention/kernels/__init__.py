"""Local attention kernels: one table, with a readable reference kernel.

kernel                the interface: problem, scores, inputs of backward
table                 all kernels by name, and the choice of one
cpu                   torch's flash kernel on the CPU
aten, flash           kernels of torch on CUDA, and of flash-attn
triton, triton_code   our own kernel, for any mask
reference             plain torch, slow and exact; attention to a cache of keys
blocks                lists of blocks for our own kernel
wrappers              features that kernels lack: head dims, any D, small tiles, NaN
"""
