"""CUDA tensors over gloo, by way of host memory: in tests several ranks share a GPU; NCCL wants one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burst_mcore.attention.runtime.communicators import Communicators
from burst_mcore.attention.runtime.executor import GroupTransport, MessageWork
from burst_mcore.attention.schedule.actions import Channel, Send


class Arrival:
    """Messages whose host memory goes on to the device when they are waited for.

    Args:
        moves: (tensor on the device, its host memory, whether it is sent) of each.
    """

    def __init__(self, works: Sequence[MessageWork], moves: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
        self._works, self._moves = works, moves

    def wait(self) -> None:
        """Wait for the messages, and copy what was received to where it belongs."""
        for work in self._works:
            work.wait()
        for device, host, sent in self._moves:
            if not sent:
                device.copy_(host)  # blocks: the host memory may go


def stage() -> list[bool]:
    """From now on messages of this process go by way of host memory, whatever device they are on.

    Returns:
        A list that grows with each message: whether it was sent, not received.
    """
    post, directions = GroupTransport.post, []

    def staged(self: GroupTransport, channel: Channel, messages: Any) -> list[Arrival]:
        moves, on_host = [], []
        for action, block in messages:
            sent = isinstance(action, Send)
            hosts = tuple(_on_host(x, filled=sent) for x in block)
            moves += [(x, host, sent) for x, host in zip(block, hosts, strict=True)]
            on_host.append((action, hosts))
        directions.extend(sent for _, _, sent in moves)
        return [Arrival(post(self, channel, on_host), moves)]

    GroupTransport.post = staged
    Communicators.reach = lambda self, device: True
    return directions


def _on_host(x: Tensor, *, filled: bool) -> Tensor:
    """Host memory like x, pinned if there is a GPU; `filled` with its values, as of the current stream."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x) if filled else host
