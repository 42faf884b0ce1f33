"""Models of transformers over shards: which are served, their attention, positions and recompute.

served         whether a model can be served; burst's attention put in
attention      attention and masks of transformers, by BurstAttention; the masks of recurrences
rotary         rotary embeddings whose frequencies depend on the length
sequence       the hooks around the forward of a model that sees a shard
randomness     dropout masks and noise of each rank its own
prefill        the prompt of generate, attended to by the ring
checkpointing  a recompute policy, attached to a model
trl            TRL's fused LM head over shards
"""
