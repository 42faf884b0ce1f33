"""The fused LM head and loss."""

from burst_mcore.loss.causal_lm import patch_causal_lm, unpatch_causal_lm, unpatched
from burst_mcore.loss.function import Metrics, fused_linear_cross_entropy
from burst_mcore.loss.table import loss_kernel

__all__ = [
    "Metrics",
    "fused_linear_cross_entropy",
    "loss_kernel",
    "patch_causal_lm",
    "unpatch_causal_lm",
    "unpatched",
]
