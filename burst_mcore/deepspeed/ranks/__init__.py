"""The groups of ranks that share a sequence, their agreement, and DeepSpeed on a machine without a GPU."""
