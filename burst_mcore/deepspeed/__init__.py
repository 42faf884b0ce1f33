"""DeepSpeed and Hugging Face: unmodified causal LMs train over sharded sequences, by DeepSpeed's JSON.

    section                the section "burst_attention" of the JSON: its keys and its errors
    settings               DeepSpeed's own settings: reading, errors
    cpu                    without a GPU: what DeepSpeed would compile is replaced
    groups                 the CP groups, as DeepSpeed takes them; the mean of gradients over all ranks
    initialize             from a model and the JSON to an engine that trains over sharded sequences
    distributed_attention  a stand-in for DeepSpeed's DistributedAttention
    accelerate             Accelerate, the Trainer and TRL: names that are replaced, and what stands there

Models, batches and losses over shards are burst_mcore.transformers', which knows nothing of DeepSpeed.
"""

from burst_mcore.agreement.claims import OthersError
from burst_mcore.deepspeed.accelerate import (
    BurstSPAttentionHF,
    BurstSPDataLoaderAdapter,
    replace_ulysses,
    restore_ulysses,
)
from burst_mcore.deepspeed.distributed_attention import BurstDistributedAttention
from burst_mcore.deepspeed.initialize import initialize, shard_loader, whole_loss
from burst_mcore.deepspeed.section import Section, SectionError
from burst_mcore.transformers.data.loader import ShardedLoader
from burst_mcore.transformers.errors import UnsupportedError

__all__ = [
    "BurstDistributedAttention",
    "BurstSPAttentionHF",
    "BurstSPDataLoaderAdapter",
    "OthersError",
    "Section",
    "SectionError",
    "ShardedLoader",
    "UnsupportedError",
    "initialize",
    "replace_ulysses",
    "restore_ulysses",
    "shard_loader",
    "whole_loss",
]
