"""What ranks compare: `Claim`, and the numbers or the error that all ranks get."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Signature = Mapping[str, str]
"""By field, values that must be the same on all ranks."""
Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Takes integers of this rank, and returns those of every rank, as many. Collective."""
WAITS, REFUSES, AHEAD = range(3)


class OthersError(ValueError):
    """The error of ranks that have none of their own: others refuse, or ranks differ."""


class Claim(NamedTuple):
    """What a rank brings to a meeting: fields that must be the same on all ranks, and numbers for them."""

    signature: Signature
    numbers: tuple[int, ...] = ()
    details: Signature = MappingProxyType({})
    """Fields that are compared as text alone, where ranks differ."""
    kind: Hashable = None
    """If given, this rank need not wait once all have met with the same numbers and claims of this kind."""
    of_call: int = 0
    """Of a backward, the number of its forward, which must be the same, too."""
    error: str | None = None
    """Why this rank refuses."""


def numbers_of(
    words: Sequence[Sequence[int]], claim: Claim, exchange: Exchange, ranks: Sequence[int]
) -> list[Sequence[int]]:
    """Return the numbers of all ranks, by their words, if these agree; else ranks exchange claims as text.

    OthersError: some refuse ("rank 1: labels must be int64"), or differ ("ranks make different calls").
    """
    hows, fields, *_ = zip(*words, strict=True)
    numbers = [word[2:] for word in words]
    uneven = AHEAD in hows and any(each != numbers[0] for each in numbers)
    if REFUSES in hows or uneven or len({*fields}) > 1:
        named = {"of call": str(claim.of_call), **claim.signature, **claim.details}
        text = json.dumps([named, claim.error and claim.error[:4000]]).encode()  # 8 bytes a character
        longest = max(length for (length,) in exchange([len(text)]))
        everyones = [json.loads(bytes(row)) for row in exchange([*text.ljust(longest)])]
        errors = dict.fromkeys(error for _, error in everyones if error is not None)
        differing = differences({rank: each for rank, (each, _) in zip(ranks, everyones, strict=True)})
        hint = (
            "; a rank went ahead: if lengths n differ, give mask & Mask.documents([0, n])" if uneven else ""
        )
        raise OthersError("; ".join([*errors][:4]) or f"ranks make different calls: {differing}{hint}")
    return numbers


def differences(signatures: Mapping[int, Signature]) -> str:
    """Return the fields that differ: "layout: zigzag on ranks [0], nothing on ranks [1]; softcap: ..."."""
    texts = []
    for field in dict.fromkeys(field for signature in signatures.values() for field in signature):
        values = {rank: each.get(field, "nothing") for rank, each in signatures.items()}
        ranks = {value: [rank for rank in values if values[rank] == value] for value in values.values()}
        if len(ranks) > 1:
            texts.append(f"{field}: {', '.join(f'{value} on ranks {ranks[value]}' for value in ranks)}")
    return "; ".join(texts)
