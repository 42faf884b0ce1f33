"""burst_mcore: BurstAttention as a plugin for Megatron-Core, DeepSpeed and plain PyTorch.

mask, layout            the attending query-key pairs, and the tokens of each rank
attention               the ring: `burst_attention`
loss                    the fused LM head and loss
checkpointing, recurrent  recompute policies; recurrences and short convolutions
rollouts                rollouts of one prompt as one packed row, a tree
megatron, deepspeed     adapters to the frameworks; wrap: their functions, replaced at run time; version
transformers            causal LMs of Hugging Face over shards, the base of deepspeed and torch
torch                   plain PyTorch: loops by hand over FSDP2 and DDP; compat: other projects' functions
agreement, config, rates, packages, dtypes, latest, words   shared by all
scripts                 scripts under a launcher

This package is for training. burst_plan plans and predicts before training, burst_bench measures.
"""

from typing import TYPE_CHECKING, Any

from burst_mcore.attention.numerics.latent import Latent
from burst_mcore.attention.numerics.rowwise import merge
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, positions, shard, unshard
from burst_mcore.mask import Mask

if TYPE_CHECKING:
    from burst_mcore.attention.api import burst_attention

__all__ = [
    "BurstConfig",
    "Latent",
    "Layout",
    "Mask",
    "Topology",
    "burst_attention",
    "merge",
    "positions",
    "shard",
    "unshard",
]


def __getattr__(name: str) -> Any:
    """Import `burst_attention` at its first use: it imports torch.compile, which takes a second.

    Programs that only plan or explain do not need this import.
    """
    if name != "burst_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from burst_mcore.attention import api

    globals()[name] = value = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
