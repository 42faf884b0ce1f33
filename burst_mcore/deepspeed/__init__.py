"""DeepSpeed and Hugging Face: an unmodified causal LM trains over sharded sequences, from DeepSpeed's JSON."""

from burst_mcore.deepspeed.initialize import initialize, shard_loader
from burst_mcore.deepspeed.loader import ShardedLoader
from burst_mcore.deepspeed.refusals import RefusedError
from burst_mcore.deepspeed.section import Section, SectionError

__all__ = [
    "RefusedError",
    "Section",
    "SectionError",
    "ShardedLoader",
    "initialize",
    "shard_loader",
]
