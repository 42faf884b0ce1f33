"""Recompute policies: the attention results that a checkpointed layer saves.

policy    Full, Segment, KeepAttention, Offload: the share of the sequence with saved results
function  checkpoint, with a policy, and recorded: the same for checkpointing of other projects
scope     Policy, and the attention calls of one checkpointed layer, recorded and replayed
offload   the memory of saved results: on the device, or pinned on the host
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
