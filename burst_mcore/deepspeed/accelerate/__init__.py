"""Accelerate, the Trainer and TRL over sharded sequences: burst takes the place of DeepSpeed's Ulysses."""

from burst_mcore.deepspeed.accelerate.loader import BurstSPDataLoaderAdapter
from burst_mcore.deepspeed.accelerate.model import BurstSPAttentionHF
from burst_mcore.deepspeed.accelerate.places import replace_ulysses, restore_ulysses

__all__ = ["BurstSPAttentionHF", "BurstSPDataLoaderAdapter", "replace_ulysses", "restore_ulysses"]
