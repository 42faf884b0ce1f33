"""CUDA graphs are refused, in one place: no capture was ever run."""

from __future__ import annotations

import torch


def refuse_capture(name: str) -> None:
    """Refuse a call on CUDA while a graph is captured on the current stream.

    Ranks agree on each call and the host reads plans and labels; a replay does neither.

    Raises:
        RuntimeError: the stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} cannot be captured in a CUDA graph: capture the layers around it, "
            "or compile in torch.compile's default mode"
        )
