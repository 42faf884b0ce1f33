"""BurstAttention as Megatron-Core's context-parallel attention.

core_attention  the module that Megatron's layers build in the place of (TE)DotProductAttention
spec            layer specs and spec providers that name it
latent          the latent of MLA layers, handed to core attention
packed          packed sequences as a mask and a layout
layouts         other layouts than zigzag: Megatron's batches and rotary positions dealt by them
patched         changes to Megatron: patches of its source, functions replaced at run time
arguments       the command-line flags, and the configuration that they make
launcher        runs an unmodified training script with those flags: `python -m burst_mcore.megatron SCRIPT`
cpu             Megatron without a GPU

Import the submodules; this package imports no Megatron by itself.
"""
