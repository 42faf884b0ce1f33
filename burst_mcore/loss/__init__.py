"""The fused LM head and loss."""

from burst_mcore.loss.causal_lm import patch_causal_lm, unpatch_causal_lm, unpatched
from burst_mcore.loss.function import Metrics, fused_linear_cross_entropy

__all__ = [
    "Metrics",
    "fused_linear_cross_entropy",
    "patch_causal_lm",
    "unpatch_causal_lm",
    "unpatched",
]


def __getattr__(name: str) -> object:
    """Refuse what is gone by name."""
    if name == "loss_kernel":
        raise ImportError(
            "burst_mcore.loss has no loss_kernel any more: the losses of torch, Liger and CCE "
            "are baselines of `burst-mcore bench loss`; to train with one of them, call that library"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
