"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses.

places   the names that are replaced, and how to restore them
model    a model that Accelerate prepares
loader   Accelerate's loaders, which give the ranks of a CP group equal batches
trainer  the Trainer's loss and tokens, and reports of an evaluation
"""

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter
from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF
from burst_mcore.deepspeed.accelerate.places import replace_ulysses, restore_ulysses

__all__ = ["BurstSPAttentionHF", "BurstSPDataLoaderAdapter", "replace_ulysses", "restore_ulysses"]
