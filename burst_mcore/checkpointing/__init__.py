"""Recompute policies: what of attention a checkpointed layer keeps."""

from burst_mcore.attention.recompute.replay import RecomputeError
from burst_mcore.checkpointing.function import checkpoint, recorded
from burst_mcore.checkpointing.policy import Full, KeepAttention, Offload, Policy, Segment

__all__ = [
    "Full",
    "KeepAttention",
    "Offload",
    "Policy",
    "RecomputeError",
    "Segment",
    "checkpoint",
    "recorded",
]
