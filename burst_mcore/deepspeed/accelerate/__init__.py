"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses.

places    the names that are replaced, and how to restore them
model     a model that Accelerate prepares
loader    Accelerate's loaders, as loaders of shards
gathered  what ranks report of an evaluation, as one process would report
trainer   the Trainer's loss and labels over shards
"""

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter
from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF
from burst_mcore.deepspeed.accelerate.places import replace_ulysses, restore_ulysses

__all__ = ["BurstSPAttentionHF", "BurstSPDataLoaderAdapter", "replace_ulysses", "restore_ulysses"]
