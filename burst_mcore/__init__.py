"""burst_mcore: BurstAttention, context-parallel attention as a plugin for Megatron-Core."""

from burst_mcore.attention.function import burst_attention
from burst_mcore.attention.prepare import prepare
from burst_mcore.attention.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, positions, shard, unshard
from burst_mcore.mask import Mask

__all__ = [
    "BurstConfig",
    "Layout",
    "Mask",
    "Topology",
    "burst_attention",
    "positions",
    "prepare",
    "shard",
    "unshard",
]
