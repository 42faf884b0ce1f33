"""Models of transformers over shards: which are supported, their attention and positions.

supported      whether a model can be supported; burst's attention put in
attention      attention and masks of transformers, by BurstAttention; the masks of recurrences
rotary         rotary embeddings whose frequencies depend on the length
sequence       the hooks around a model's forward; whole outputs from those of shards
strategies     a batch that is whole, and sharded here; or a shard, which is trusted
vision         what enters the text tower of a model with images, sharded
towers         images given out over the ranks, and their features gathered
randomness     dropout masks and noise of each rank its own
"""
