"""Ranks that share a loss must call it alike: where one refuses its input, all of them get an error."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST = -(2**62)
"""Below all that is exchanged."""
_ODD = 0x1E3779B97F4A7C15
"""A factor without a pattern: products wrap."""


def agree(
    group: dist.ProcessGroup, error: str | None, facts: str, numbers: Sequence[int], device: torch.device
) -> tuple[bool, bool, list[list[int]]]:
    """Whether a rank of the group has an error, whether all have the same facts, and all numbers by rank.

    One all-reduce of a few integers, on `device` if NCCL does it. Every rank of the group must come, with as
    many numbers.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "big")
    everyones = torch.full((size, len(numbers)), _LEAST, dtype=torch.int64)
    everyones[rank] = torch.tensor([*numbers], dtype=torch.int64)
    words = torch.cat([torch.tensor([int(error is not None), digest, -digest]), everyones.flatten()])
    found = words.to(device) if dist.get_backend(group) == "nccl" else words
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


def digest(x: Tensor) -> Tensor:
    """Of all values and their places, an int64 above -2^62, on x's device; -0 is 0, and NaNs are alike."""
    values = x.detach().flatten().double() + 0.0
    bits = values.where(~values.isnan(), torch.nan).view(torch.int64)
    mixed = (bits ^ (torch.arange(1, len(bits) + 1, device=x.device) * _ODD)) * _ODD
    return ((mixed ^ (mixed >> 32)) * _ODD).sum() >> 2


def fingerprint(rows: Tensor) -> int:
    """Of some rows of a weight; 0 where those are alike, and may rightly be those of another rank too."""
    if rows.numel() == 0:
        return 0
    some = torch.stack([rows[0], rows[len(rows) // 2], rows[-1]]).detach().cpu()
    return 0 if bool((some == some[0]).all()) else int(digest(some))


def same_on_all(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Whether a tensor is the same on all ranks."""
    mine = digest(x)
    ends = torch.stack([mine, -mine])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    most, minus_least = ends.tolist()
    return bool(most == -minus_least)
