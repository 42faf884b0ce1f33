"""Recompute policies: what of attention a checkpointed layer keeps.

policy    Full, Segment, KeepAttention, Offload: the share of the sequence that a call keeps
function  checkpoint, with a policy, and recorded: the same for checkpointing of other projects
scope     Policy, and the attention calls of one checkpointed layer, recorded and replayed
offload   where kept results wait for backward: on the device, or in pinned host memory
"""

from burst_mcore.attention.replay import RecomputeError
from burst_mcore.checkpointing.function import checkpoint, recorded
from burst_mcore.checkpointing.policy import Full, KeepAttention, Offload, Segment
from burst_mcore.checkpointing.scope import Policy

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
