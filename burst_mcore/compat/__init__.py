"""Functions with the names of other projects' functions: a training stack changes one import.

ring_flash_attn  ring-flash-attention's adapter of transformers' flash attention
"""
