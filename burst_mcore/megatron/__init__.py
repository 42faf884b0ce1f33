"""BurstAttention as Megatron-Core's context-parallel attention.

core_attention  the module that Megatron's layers build in the place of (TE)DotProductAttention
spec            layer specs and spec providers that name it
ahead           batches of packed documents, planned while the batch before is trained on
latent          the latent of MLA layers, handed to core attention
packed          packed sequences as a mask and a layout
layouts         other layouts than zigzag: Megatron's batches and rotary positions sharded by them
fused_loss      the fused LM head and loss in Megatron's models
recompute       recompute policies under Megatron's checkpointing
patched         the functions that patched lines of Megatron call
arguments       the command-line flags, and the configuration that they make
rules           the table of settings that are refused, each with the reason and what to do instead
asked           arguments judged, and the way and kernel that they ask for
launcher        runs an unmodified training script with those flags: `python -m burst_mcore.megatron SCRIPT`
cpu             Megatron without a GPU

Import the submodules; this package imports no Megatron by itself.
"""
