"""Local attention kernels: one table, and a readable reference beside the fast ones.

kernel                the interface: problem, scores, inputs of backward
table                 all kernels by name, and the choice of one
cpu                   torch's flash kernel on the CPU
aten, flash, te       kernels of torch on CUDA, of flash-attn and TransformerEngine
triton, triton_code   our own kernel, for any mask
reference             plain torch, slow and exact
cached                attention to a cache of keys; merge, of attention over two sets of keys
blocks                lists of blocks for our own kernel
wrappers              what kernels lack: head dims, any D, small tiles, NaN
"""
