"""Attention of other projects over ranks, each as its library has it: rows of METHODS.

ring        torch's own ring templates, on CPUs and GPUs
gpu         TransformerEngine by Megatron, ring-flash-attn, yunchang, MagiAttention: on GPUs
"""
