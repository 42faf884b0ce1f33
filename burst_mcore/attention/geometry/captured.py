"""Memory that a captured CUDA graph reads at every replay, kept alive for as long as the process.

Tables, lists of blocks and ends of sequences live as long as their plan, which may leave its cache. A graph
that was captured with them holds their addresses alone. Their sources on the host, too: a copy that is made
while a graph is captured is made again at each replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

_READ_BY_GRAPHS: dict[int, Tensor] = {}
"""By address of the memory."""


def keep_for_graphs(device: torch.device, *tensors: Tensor) -> None:
    """Keep the memory of tensors if a graph is being captured on the current stream of a GPU."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _READ_BY_GRAPHS.update({x.untyped_storage().data_ptr(): x for x in tensors})
