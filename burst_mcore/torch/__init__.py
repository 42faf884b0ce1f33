"""Plain PyTorch: any training loop under FSDP2 or DDP over sharded sequences.

parallel   parallelize, and what a loop asks of the ranks that share sequences
reduction  who reduces gradients over those ranks, and by which factor
accelerate Accelerate and the Trainer with cp_size: burst in the place of torch's ring

`import torch` in these files is the library: imports are absolute.
"""

from burst_mcore.agreement.claims import OthersError
from burst_mcore.loss.statistics import TokenStats, token_statistics
from burst_mcore.torch.accelerate import replace_context_parallel, restore_context_parallel
from burst_mcore.torch.parallel import ContextParallel, parallelize
from burst_mcore.transformers.errors import UnsupportedError

__all__ = [
    "ContextParallel",
    "OthersError",
    "TokenStats",
    "UnsupportedError",
    "parallelize",
    "replace_context_parallel",
    "restore_context_parallel",
    "token_statistics",
]
