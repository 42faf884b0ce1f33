"""Batches of whole sequences, and loaders that shard them to the ranks of a CP group.

batches  the part of a rank of a batch: pure functions
loader   a loader of whole sequences as a loader of shards; one batch that every rank has
"""
