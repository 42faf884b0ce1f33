"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses.

places  the names that are replaced, and how to restore them
model   a model that Accelerate prepares
"""

from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF
from burst_mcore.deepspeed.accelerate.places import replace_ulysses, restore_ulysses
from burst_mcore.transformers.accelerate.loader import BurstSPDataLoaderAdapter

__all__ = ["BurstSPAttentionHF", "BurstSPDataLoaderAdapter", "replace_ulysses", "restore_ulysses"]
