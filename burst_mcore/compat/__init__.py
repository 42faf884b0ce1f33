"""Functions of other projects by their names: a training stack changes one import.

ring_flash_attn  those of ring-flash-attention that put a ring under transformers' flash attention
"""
