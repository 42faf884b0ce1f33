"""DeepSpeed and Hugging Face: unmodified causal LMs train over sharded sequences, by DeepSpeed's JSON."""

from burst_mcore.deepspeed.accelerate import (
    BurstSPAttentionHF,
    BurstSPDataLoaderAdapter,
    replace_ulysses,
    restore_ulysses,
)
from burst_mcore.deepspeed.distributed_attention import BurstDistributedAttention
from burst_mcore.deepspeed.errors import RefusedError
from burst_mcore.deepspeed.initialize import initialize, shard_loader
from burst_mcore.deepspeed.loader import ShardedLoader
from burst_mcore.deepspeed.section import Section, SectionError

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
]
