"""What ranks compare: claims, words on a numbered call, their exchange, and the text of their differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from burst_mcore.words import digest

Signature = dict[str, str]
"""By field, values that must be the same on all ranks."""
WAITS, REFUSES, AHEAD = range(3)
"""How a rank comes to a call."""
REFUSED = -1
"""The number of a claim with an error."""


class Claim(NamedTuple):
    """The signature of one rank's call, or the error for which the rank makes none."""

    signature: Signature
    error: str | None = None

    @property
    def number(self) -> int:
        """An integer that ranks compare before texts: the signature's digest, or REFUSED."""
        return REFUSED if self.error is not None else digest_of(self.signature)


class Word(NamedTuple):
    """The integers with which a rank comes to a numbered call, 32 bytes."""

    how: int
    always: int = 0
    """A digest of the call's number and of the fields that must be the same."""
    if_even: int = 0
    """A digest of the fields that must be the same only if all ranks have as many rows."""
    rows: int = 0


def digest_of(signature: Signature) -> int:
    """Return 56 bits that tell signatures apart; the order of their fields does not count."""
    return digest_of_items(tuple(signature.items()))


@lru_cache(maxsize=1024)  # the calls of a layer have the same signature in every step
def digest_of_items(items: tuple[tuple[str, str], ...]) -> int:
    """Return the `digest_of` a signature, given as its items."""
    return int(digest(json.dumps(dict(items), sort_keys=True))[:14], 16)


def alike(numbers: Iterable[int]) -> bool:
    """Return whether claims with these numbers have one signature, and no error."""
    numbers = set(numbers)
    return len(numbers) == 1 and REFUSED not in numbers


def integers_of(
    group: dist.ProcessGroup, mine: Sequence[int], device: torch.device | None = None
) -> list[list[int]]:
    """Return the integers of every rank of a group, by rank; all give as many. Collective over the group.

    Args:
        device: where NCCL finds the integers, by default the current GPU; other backends use the CPU.
    """
    nccl = dist.get_backend(group) == "nccl"
    row = torch.tensor([*mine], dtype=torch.int64, device=(device or "cuda") if nccl else "cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    table: list[list[int]] = torch.stack(rows).tolist()
    return table


def claims_of(groups: Sequence[dist.ProcessGroup], claim: Claim) -> dict[int, Claim]:
    """Return the claims of all ranks that `groups` join, one group after another, by global rank, ascending.

    With a rank's tensor-parallel group and then its context-parallel group these are all ranks of the grid.
    Collective over each of the groups.
    """
    claims = {dist.get_rank(): claim}
    for group in groups:
        everyones: list[dict[int, Claim]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everyones, claims, group=group)
        claims = {rank: each for known in everyones for rank, each in known.items()}
    return dict(sorted(claims.items()))


def disagreement(claims: Mapping[int, Claim]) -> str | None:
    """Return why ranks with these claims do not agree; None if they do.

    Errors come before differences: "rank 1: labels must be int64", else "ranks make different calls: ...".
    """
    errors = [f"rank {rank}: {claim.error}" for rank, claim in claims.items() if claim.error is not None]
    if errors:
        return "; ".join(errors)
    text = differences({rank: claim.signature for rank, claim in claims.items()})
    return f"ranks make different calls: {text}" if text else None


def differences(signatures: Mapping[int, Signature]) -> str:
    """Return each field that differs, with the ranks of each value; a rank without the field has "nothing".

    For instance "layout: zigzag on ranks [0], striped on ranks [1]; softcap: 5.0 on ranks [0], ...".
    """
    texts = []
    for field in dict.fromkeys(field for signature in signatures.values() for field in signature):
        values = {rank: each.get(field, "nothing") for rank, each in signatures.items()}
        ranks = {value: [rank for rank in values if values[rank] == value] for value in values.values()}
        if len(ranks) > 1:
            texts.append(f"{field}: {', '.join(f'{value} on ranks {ranks[value]}' for value in ranks)}")
    return "; ".join(texts)


def lengths_of(words: Sequence[Word], signatures: Callable[[], Mapping[int, Signature]]) -> tuple[int, ...]:
    """Return the rows of all ranks, of a call that nobody refused.

    Raises ValueError if the ranks make different calls: with all their `signatures`, which are not there yet.
    """
    rows = tuple(word.rows for word in words)
    uneven = len(set(rows)) > 1
    if len({(word.always, uneven or word.if_even) for word in words}) > 1:
        raise ValueError(f"the ranks of the ring make different calls: {differences(signatures())}")
    if uneven and AHEAD in {word.how for word in words}:
        raise ValueError(
            f"the ranks hold {[*rows]} tokens, but a rank went ahead as if all held as many, as in an "
            f"earlier call: where the length n of sequences changes, give mask & Mask.documents([0, n])"
        )
    return rows
