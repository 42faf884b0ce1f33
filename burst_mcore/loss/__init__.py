"""The fused LM head and loss."""

from burst_mcore.loss.causal_lm import patch_causal_lm, unpatch_causal_lm
from burst_mcore.loss.function import Metrics, fused_linear_cross_entropy

__all__ = ["Metrics", "fused_linear_cross_entropy", "patch_causal_lm", "unpatch_causal_lm"]
