"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses.

places  the names that are replaced, and what stands there: the Trainer's loss, reports of an evaluation
model   a model that Accelerate prepares
loader  Accelerate's loaders, as loaders of shards
"""

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter
from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF
from burst_mcore.deepspeed.accelerate.places import replace_ulysses, restore_ulysses

__all__ = ["BurstSPAttentionHF", "BurstSPDataLoaderAdapter", "replace_ulysses", "restore_ulysses"]
