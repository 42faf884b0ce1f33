"""Attention on one GPU while messages are under way, sent by NCCL to the same GPU; beside attention alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.runtime.communicators import companion
from burst_mcore.bench.core import Bar, Case, Derived, Method, Stage, Subject, Table, Trial, World, column
from burst_mcore.bench.methods.kernels import others
from burst_mcore.bench.subjects.kernels import KernelCase, Tiles


@dataclass(frozen=True, kw_only=True)
class HopsCase(Case):
    """A causal square of attention, and the messages that travel meanwhile."""

    tokens: int = 8192
    heads: int = 32
    head_dim: int = 128
    ctas: int = 8
    """Thread blocks that NCCL may use for a communicator."""
    priority: bool = True
    """Messages are on streams of high priority."""
    communicators: int = 2
    """Each carries a message of the size of K and V."""


def _build(case: HopsCase, world: World) -> None:
    """Do nothing: the stage makes all that is needed."""


def _methods(case: HopsCase) -> Mapping[str, Method]:
    return {"under way": Method("under way", _build)}


def _stage(case: HopsCase, world: World) -> Stage:
    """On a CPU a message is a copy, at once: NCCL is not there."""
    square = KernelCase(tokens=case.tokens, heads=case.heads, head_dim=case.head_dim)
    tensors = square.tensors(world.device)
    calls = Tiles(KERNELS[others(square, world.device)[0]], square, tensors)
    bundles = [torch.cat([x.flatten() for x in tensors[1:3]]) for _ in range(case.communicators)]
    arrived = [torch.empty_like(bundle) for bundle in bundles]
    groups = []
    if world.device == "cuda":
        for _ in bundles:
            groups.append(companion([0], "nccl", timedelta(minutes=2), case.ctas, priority=case.priority))

    def post() -> list[dist.Work]:
        if not groups:
            for to, bundle in zip(arrived, bundles, strict=True):
                to.copy_(bundle)
            return []
        return [work for each in zip(groups, bundles, arrived, strict=True) for work in _to_oneself(*each)]

    def under_way() -> None:
        works = post()
        calls.forward()
        for work in works:
            work.wait()

    def hops() -> None:
        for work in post():
            work.wait()

    units = {"alone": Trial({"": calls.forward}, ahead=True), "messages": Trial({"": hops}, ahead=True)}
    size = sum(bundle.nbytes for bundle in bundles)
    return Stage(
        lambda method: Trial({"": under_way}, ahead=True), units, facts={("messages", "sent"): float(size)}
    )


def _to_oneself(group: dist.ProcessGroup, bundle: Tensor, to: Tensor) -> list[dist.Work]:
    ops = [dist.P2POp(op, x, group=group, group_peer=0) for op, x in ((dist.irecv, to), (dist.isend, bundle))]
    works: list[dist.Work] = dist.batch_isend_irecv(ops)
    return works


def _derive(case: HopsCase, table: Table) -> Derived:
    walls = column(table, "wall")
    if {"under way", "alone", "messages"} <= walls.keys():
        yield (
            "under way",
            "this / alone",
            [a / b for a, b in zip(walls["under way"], walls["alone"], strict=True)],
        )
        size = table["messages", "sent"][0]
        yield "messages", "GB/s", [size / seconds / 1e9 for seconds in walls["messages"]]


def _cases(device: str) -> Mapping[str, HopsCase]:
    cases = [HopsCase(ctas=ctas) for ctas in (4, 8, 16)] + [HopsCase(priority=False)]
    return {f"{c.ctas} CTAs, {'high' if c.priority else 'normal'} priority": c for c in cases}


def _bars(name: str, case: HopsCase | None, device: str) -> Sequence[Bar]:
    if case is None or device != "cuda" or not case.priority or case.ctas > 8:
        return ()
    return [Bar("attention with messages under way, over attention alone", "under way", "this / alone", 1.02)]


SUBJECT = Subject(
    name="hops",
    about="Attention while NCCL carries messages on the same GPU, beside attention alone; bars for an H200.",
    case=HopsCase,
    cases=_cases,
    stage=_stage,
    kind="",
    methods=_methods,
    devices=("cpu", "cuda"),
    repeats=5,
    derive=_derive,
    bars=_bars,
)
