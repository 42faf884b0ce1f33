"""Memory that a captured CUDA graph reads at every replay, kept alive for as long as the process.

Lists of blocks and ends of sequences live as long as their plan, which may leave its cache. A graph that was
captured with them holds their addresses alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_READ_BY_GRAPHS: dict[int, Tensor] = {}
"""By address of the memory."""


def keep_for_graphs(x: Tensor) -> None:
    """Keep the memory of x if a graph is being captured on the current stream."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _READ_BY_GRAPHS[x.untyped_storage().data_ptr()] = x
