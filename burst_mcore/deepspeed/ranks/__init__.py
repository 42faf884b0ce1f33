"""The ranks that share a sequence, and DeepSpeed on a machine without a GPU.

groups     the sequence groups, as DeepSpeed takes them
agreement  errors of one rank as errors of all
cpu        DeepSpeed on a CPU, over gloo, without a compiler
"""
