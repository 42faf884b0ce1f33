"""The ranks that share a sequence, and DeepSpeed on a machine without a GPU.

groups  the CP groups, as DeepSpeed takes them; the mean of gradients over all ranks
cpu     DeepSpeed on a CPU, over gloo, without a compiler
"""
