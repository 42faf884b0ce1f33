"""BurstAttention as Megatron-Core's context-parallel attention.

core_attention  the module that replaces (TE)DotProductAttention in Megatron's layers
spec            layer specs and spec providers with this module
latent          the latent of MLA layers, passed to core attention
packed          packed sequences as a mask and a layout
layouts         other layouts than zigzag: Megatron's batches and rotary positions sharded by them
fused_loss      the fused LM head and loss in Megatron's models
recompute       recompute policies under Megatron's checkpointing
patched         the functions that patched lines of Megatron call
arguments       the command-line flags, and their configuration
rules           the table of unsupported settings, each with the reason and an alternative
checks          of arguments, and the route and kernel that they choose
launcher        runs an unmodified training script with these flags: `python -m burst_mcore.megatron SCRIPT`
cpu             Megatron without a GPU

Import the submodules; this package imports no Megatron by itself.
"""
