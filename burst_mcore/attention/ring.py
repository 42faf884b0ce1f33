"""Executes a program: posts and waits for messages, owns the buffers, and calls back for the math."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.schedule import (
    DATA,
    HOME,
    Accumulate,
    Action,
    Compute,
    Program,
    Recv,
    Send,
    Wait,
)
from burst_mcore.attention.topology import Topology

Bundle = tuple[Tensor, ...]


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """Carries bundles between the ranks of one ring."""

    def post(self, channel: str, messages: Sequence[tuple[Send | Recv, Bundle]]) -> Sequence[Work]:
        """Start all messages as one batch."""
        ...


class ProcessGroups:
    """Messages over torch.distributed: on CUDA a wait holds back the current stream, never the host."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def post(self, channel: str, messages: Sequence[tuple[Send | Recv, Bundle]]) -> Sequence[Work]:
        """Start all messages as one batch, in their order (receives first is fastest on gloo)."""
        group = self._topology.group if channel == DATA else self._topology.gradient_group
        first_tag = 0 if channel == DATA else 64
        return dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend if isinstance(action, Send) else dist.irecv,
                    tensor,
                    group=group,
                    group_peer=action.peer,
                    tag=first_tag + index,
                )
                for action, bundle in messages
                for index, tensor in enumerate(bundle)
            ]
        )


class Ring:
    """The buffers of one pass over the ring and the execution of its program.

    Args:
        home: the rank's own bundle, read only; contiguous tensors.
        new_sum: makes an uninitialised travelling gradient; None in a pass that sends none.
    """

    def __init__(
        self, transport: Transport, home: Bundle, new_sum: Callable[[], Bundle] | None = None
    ) -> None:
        self._transport = transport
        self._home = home
        self._new_sum = new_sum
        self._buffers: dict[str, Bundle] = {HOME: home}
        self._under_way: dict[str, list[Work]] = {}

    def run(
        self,
        program: Program,
        compute: Callable[[int, Bundle], None],
        accumulate: Callable[[Bundle, bool], None] | None = None,
    ) -> None:
        """Execute `program`.

        compute(source, bundle) attends to a bundle; accumulate(sums, first) then adds its gradients to the
        travelling sums, or sets them if `first`.
        """
        for (batch, channel), actions in groupby(program, key=_batch):
            if batch:
                self._post(channel, [a for a in actions if isinstance(a, (Send, Recv))])
                continue
            for action in actions:
                match action:
                    case Wait():
                        for work in self._under_way.pop(action.channel):
                            work.wait()
                    case Compute():
                        compute(action.source, self.buffer(action.buffer))
                    case Accumulate():
                        assert accumulate is not None
                        accumulate(self.buffer(action.buffer), action.first)

    def buffer(self, name: str) -> Bundle:
        """The bundle called `name`, made at its first use."""
        if name not in self._buffers:
            if name.startswith("data"):
                self._buffers[name] = tuple(map(torch.empty_like, self._home))
            else:
                assert self._new_sum is not None
                self._buffers[name] = self._new_sum()
        return self._buffers[name]

    def _post(self, channel: str, actions: list[Send | Recv]) -> None:
        messages = [(action, self.buffer(action.buffer)) for action in actions]
        self._under_way.setdefault(channel, []).extend(self._transport.post(channel, messages))


def _batch(action: Action) -> tuple[bool, str]:
    """Neighbouring sends and receives of one channel start together."""
    return (True, action.channel) if isinstance(action, (Send, Recv)) else (False, "")
