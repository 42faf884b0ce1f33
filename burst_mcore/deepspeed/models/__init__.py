"""Models of transformers over shards: which are served, their attention, positions, loss and recompute."""
