"""Ranks that share a loss must call it alike: where one refuses its input, all of them get an error."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST = -(2**62)
"""Below all that is exchanged."""


def agree(
    group: dist.ProcessGroup, error: str | None, facts: str, numbers: Sequence[int]
) -> tuple[bool, bool, list[list[int]]]:
    """Whether a rank of the group has an error, whether all have the same facts, and all numbers by rank.

    One all-reduce of a few integers. Every rank of the group must come, with as many numbers.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "big")
    everyones = torch.full((size, len(numbers)), _LEAST, dtype=torch.int64)
    everyones[rank] = torch.tensor([*numbers], dtype=torch.int64)
    words = torch.cat([torch.tensor([int(error is not None), digest, -digest]), everyones.flatten()])
    found = words.cuda() if dist.get_backend(group) == "nccl" else words
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    failed, most, minus_least, *rest = found.tolist()
    count = len(numbers)
    return bool(failed), most == -minus_least, [rest[i * count : (i + 1) * count] for i in range(size)]


def refusal(groups: Sequence[dist.ProcessGroup], error: str | None, facts: str) -> str:
    """What to tell the user where `agree` was false in one of the groups; all their ranks must call it."""
    said: list[tuple[int, str | None, str]] = [(dist.get_rank(), error, facts)]
    for group in groups:
        heard: list[list[tuple[int, str | None, str]] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(heard, said, group=group)
        said = sorted(
            {entry for entries in heard if entries for entry in entries}, key=lambda entry: entry[0]
        )
    wrong = [f"rank {rank}: {text}" for rank, text, _ in said if text is not None]
    if wrong:
        return "; ".join(dict.fromkeys(wrong))
    kinds = sorted({text for *_, text in said})
    return "ranks make different calls: " + "; ".join(
        f"ranks {[rank for rank, _, text in said if text == kind]}: {kind}" for kind in kinds
    )


def fingerprint(row: Tensor) -> int:
    """Of what a row holds; 0 for one that is constant."""
    if row.numel() == 0 or bool((row == row[0]).all()):
        return 0
    exact = row.detach().to(torch.float64).cpu()
    return int.from_bytes(hashlib.sha256(exact.numpy().tobytes()).digest()[:7], "big")


def same_on_all(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Whether a tensor's sum is the same number on all ranks."""
    total = x.double().sum().nan_to_num(nan=0.5, posinf=1.5, neginf=2.5)
    ends = torch.stack([total, -total])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    most, minus_least = ends.tolist()
    return bool(most == -minus_least)
