"""DeepSpeed and Hugging Face: unmodified causal LMs train over sharded sequences, by DeepSpeed's JSON.

    config       the section of the JSON, DeepSpeed's own settings, and what is refused of both
    ranks        which ranks share a sequence, and how they agree
    data         batches of whole sequences, dealt to the ranks
    models       which models are served, their attention, positions, loss and recompute over shards
    engine       initialize, the doctor, and a stand-in for DistributedAttention
    accelerate   the Trainer, Accelerate and TRL, in the places where they look for DeepSpeed's Ulysses

Everything that is refused is a RefusedError (errors).
"""

from burst_mcore.deepspeed.accelerate import (
    BurstSPAttentionHF,
    BurstSPDataLoaderAdapter,
    replace_ulysses,
    restore_ulysses,
)
from burst_mcore.deepspeed.config.section import Section, SectionError
from burst_mcore.deepspeed.data.loader import ShardedLoader
from burst_mcore.deepspeed.engine.distributed_attention import BurstDistributedAttention
from burst_mcore.deepspeed.engine.initialize import initialize, shard_loader, whole_loss
from burst_mcore.deepspeed.errors import RefusedError

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
