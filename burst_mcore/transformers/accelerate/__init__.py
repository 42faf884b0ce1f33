"""Accelerate, the Trainer and TRL over sharded sequences, under whichever engine they train.

loader    Accelerate's loaders, as loaders of shards
trainer   the Trainer's loss and evaluation over shards
gathered  what ranks report of an evaluation, as one process would report
"""
