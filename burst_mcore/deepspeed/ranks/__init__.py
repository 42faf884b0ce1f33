"""Which ranks share a sequence, how they agree, and what DeepSpeed needs on a machine without a GPU."""
