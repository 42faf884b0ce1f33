"""What ranks compare: words, which are claims as integers, and the text of differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from burst_mcore.words import digest

Signature = Mapping[str, str]
"""By field, values that must be the same on all ranks."""
Told = tuple[Signature, str | None]
"""A claim as text: its fields, and why the rank refuses, if it does."""
Word = list[int]
"""A claim as integers: how a rank comes, digests of fields, and of fields if all ranks are even; numbers."""
NUMBERS = 6
"""Numbers of a word, which has 72 bytes."""
WAITS, REFUSES, AHEAD = range(3)
"""How a rank comes to a meeting."""
MOST = 4
"""Ranks whose errors are named, at most."""


def numbers_of(
    words: Sequence[Word], claims: Callable[[], Mapping[int, Told]], ranks: str = "ranks"
) -> list[Word]:
    """Return the numbers of all ranks, if these agree.

    Args:
        claims: returns the claims as text, by rank, of all ranks, or of one that refuses.
        ranks: the noun for the ranks.

    Raises:
        ValueError: ranks refuse ("rank 1: labels must be int64"), or differ ("ranks make different calls").
    """
    hows, numbers = [word[0] for word in words], [word[3:] for word in words]
    uneven = any(each != numbers[0] for each in numbers)
    if REFUSES in hows:
        errors = dict.fromkeys(error for _, error in claims().values() if error is not None)
        raise ValueError("; ".join([*errors][:MOST]) or "a rank refused this call, and has gone")
    if len({(word[1], uneven or word[2]) for word in words}) > 1:
        fields = {rank: fields for rank, (fields, _) in claims().items()}
        raise ValueError(f"{ranks} make different calls: {differences(fields)}")
    if uneven and AHEAD in hows:
        raise ValueError(
            f"the ranks hold {[first for first, *_ in numbers]} tokens, but a rank went ahead as if all held "
            f"as many, as in an earlier call: where the length n of sequences changes, give mask & "
            f"Mask.documents([0, n])"
        )
    return numbers


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
