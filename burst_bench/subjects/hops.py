"""Attention on one GPU while messages are under way, sent by NCCL to the same GPU; beside attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from burst_bench.core import Derived, Method, Stage, Table, Trial, World
from burst_bench.methods.kernels import SquareCase, others
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.runtime.communicators import companion


@dataclass(frozen=True, kw_only=True)
class HopsCase(SquareCase):
    """Attention while NCCL carries messages on the same GPU, beside attention alone."""

    subject = "hops"

    tokens: int = 8192
    ctas: int = 8
    """Thread blocks that NCCL may use for a communicator."""
    priority: bool = True
    """Messages are on streams of high priority."""
    communicators: int = 2
    """Each carries a message of the size of K and V."""

    def methods(self) -> Sequence[Method]:
        return [Method("under way")]

    def prepare(self, world: World) -> Stage:
        tensors = self.tensors(world.device)
        calls = self.bare(KERNELS[others(self, world.device)[0]], tensors)
        messages = Messages(self, torch.cat([x.flatten() for x in tensors[1:3]]))

        def under_way() -> None:
            works = messages.post()
            calls.forward()
            for work in works:
                work.wait()

        def hops() -> None:
            for work in messages.post():
                work.wait()

        units = {"alone": Trial({"": calls.forward}, ahead=True), "messages": Trial({"": hops}, ahead=True)}
        return Stage(
            lambda method: Trial({"": under_way}, ahead=True),
            units,
            facts={("messages", "sent"): float(messages.size)},
        )

    def derive(self, table: Table) -> Derived:
        yield "under way", "this / alone", table.over(("under way", "wall"), ("alone", "wall"))
        size, walls = table["messages", "sent"][0], table.column("wall")
        yield "messages", "GB/s", [size / seconds / 1e9 for seconds in walls.get("messages", ())]


class Messages:
    """Messages of one process to itself. On a CPU a message is a copy, at once: NCCL is not there."""

    def __init__(self, case: HopsCase, bundle: Tensor) -> None:
        self.size = case.communicators * bundle.nbytes
        self.pairs = [(bundle.clone(), torch.empty_like(bundle)) for _ in range(case.communicators)]
        self.groups = [
            companion([0], "nccl", timedelta(minutes=2), case.ctas, priority=case.priority)
            for _ in (self.pairs if bundle.is_cuda else ())
        ]

    def post(self) -> list[dist.Work]:
        """Send and receive all messages; return what is to be waited for."""
        works: list[dist.Work] = []
        for group, (bundle, arrived) in zip(self.groups, self.pairs, strict=False):
            ends = (dist.irecv, arrived), (dist.isend, bundle)
            works += dist.batch_isend_irecv([dist.P2POp(op, x, group=group, group_peer=0) for op, x in ends])
        if not self.groups:
            for bundle, arrived in self.pairs:
                arrived.copy_(bundle)
        return works
