"""DeepSpeed and Hugging Face: unmodified causal LMs train over sharded sequences, by DeepSpeed's JSON.

    config       the section of the JSON, DeepSpeed's own settings, and what is refused of both
    ranks        which ranks share a sequence
    engine       initialize, and a stand-in for DistributedAttention
    accelerate   the Trainer, Accelerate and TRL, in the places where they look for DeepSpeed's Ulysses

Models, batches and losses over shards are burst_mcore.transformers', which knows nothing of DeepSpeed.
"""

from burst_mcore.deepspeed.accelerate import (
    BurstSPAttentionHF,
    BurstSPDataLoaderAdapter,
    replace_ulysses,
    restore_ulysses,
)
from burst_mcore.deepspeed.config.section import Section, SectionError
from burst_mcore.deepspeed.engine.distributed_attention import BurstDistributedAttention
from burst_mcore.deepspeed.engine.initialize import initialize, shard_loader, whole_loss
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import RefusedError

__all__ = [
    "BurstDistributedAttention",
    "BurstSPAttentionHF",
    "BurstSPDataLoaderAdapter",
    "RefusedError",
    "Section",
    "SectionError",
    "ShardedLoader",
    "initialize",
    "replace_ulysses",
    "restore_ulysses",
    "shard_loader",
    "whole_loss",
]
