"""What ranks compare: `Claim`, its integers, and the numbers or the error that all ranks get."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from burst_mcore.words import digest

Signature = Mapping[str, str]
"""By field, values that must be the same on all ranks."""
Word = list[int]
"""A claim as integers: how a rank comes, digests of fields, and of fields if all ranks are even; numbers."""
Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Takes integers of this rank, and returns those of every rank, as many. Collective."""
NUMBERS = 6
"""Numbers of a word, which has 72 bytes."""
MOST = 4000
"""Characters of an error that the other ranks get, at most."""
WAITS, REFUSES, AHEAD = range(3)
"""How a rank comes to a meeting."""


class OthersError(ValueError):
    """The error of ranks that have none of their own: others refuse, or ranks differ."""


class Claim(NamedTuple):
    """What a rank brings to a meeting: fields that must be the same on all ranks, and numbers for them."""

    signature: Signature
    numbers: tuple[int, ...] = ()
    if_even: Signature = MappingProxyType({})
    """Fields that must be the same as well, but only if the numbers of all ranks are the same."""
    kind: Hashable = None
    may_go_ahead: bool = False
    """Whether this rank need not wait, once all ranks have met with claims of this kind."""
    of_call: int = 0
    """Of a backward, the number of its forward, which must be the same, too."""
    error: str | None = None
    """Why this rank refuses."""


def numbers_of(
    words: Sequence[Word], claim: Claim, exchange: Exchange, noun: str, ranks: Sequence[int] | None = None
) -> list[list[int]]:
    """Return the numbers of all ranks, if these agree; else the ranks exchange their claims as text.

    Args:
        words: the claims of all ranks; `claim` is this rank's.
        noun: the word for ranks; `ranks` are their names, by default 0, 1, ...

    Raises:
        OthersError: ranks refuse ("rank 1: labels must be int64"), or differ ("ranks make different calls").
    """
    numbers = [word[3:] for word in words]
    refused = any(word[0] == REFUSES for word in words)
    uneven = any(each != numbers[0] for each in numbers)
    if refused or len({(word[1], uneven or word[2]) for word in words}) > 1:
        fields = {"of call": str(claim.of_call), **claim.signature, **claim.if_even}
        everyones = _texts(exchange, [fields, claim.error and claim.error[:MOST]])
        errors = dict.fromkeys(error for _, error in everyones if error is not None)
        signatures = [signature for signature, _ in everyones]
        differing = differences(dict(zip(ranks or range(len(words)), signatures, strict=True)))
        raise OthersError("; ".join([*errors][:4]) or f"{noun} make different calls: {differing}")
    if uneven and AHEAD in [how for how, *_ in words]:
        raise OthersError(
            f"the ranks hold {[first for first, *_ in numbers]} tokens, but a rank went ahead as if all held "
            f"as many, as in an earlier call: where the length n of sequences changes, give mask & "
            f"Mask.documents([0, n])"
        )
    return numbers


def _texts(exchange: Exchange, value: object) -> list[tuple[Signature, str | None]]:
    """Return a value of every rank, sent as bytes of JSON, filled up with spaces."""
    text = json.dumps(value).encode()
    longest = max(length for (length,) in exchange([len(text)]))
    return [json.loads(bytes(row)) for row in exchange([*text.ljust(longest)])]


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


@lru_cache(maxsize=1024)  # the calls of a layer have the same signature in every step
def digest_of(*items: tuple[str, str]) -> int:
    """Return 56 bits that tell signatures apart, from their items; the order of these does not count."""
    return int(digest(json.dumps(dict(items), sort_keys=True))[:14], 16)
