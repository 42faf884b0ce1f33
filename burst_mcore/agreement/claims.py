"""What ranks compare: claims, words on a numbered call, and the text of their differences. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

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
    """The integers with which a rank comes to a numbered call, 40 bytes."""

    how: int
    call: int = 0
    always: int = 0
    """A digest of the fields that must be the same."""
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


def lengths_of(words: Sequence[Word], signatures: Callable[[], Mapping[int, Signature]]) -> list[int] | None:
    """Return the rows of all ranks, if they differ, of a call that nobody refused.

    Raises ValueError if the ranks make different calls: with all their `signatures`, which are not there yet.
    """
    rows = [word.rows for word in words]
    uneven = len(set(rows)) > 1
    if len({(word.call, word.always, uneven or word.if_even) for word in words}) > 1:
        raise ValueError(f"the ranks of the ring make different calls: {differences(signatures())}")
    if uneven and AHEAD in {word.how for word in words}:
        raise ValueError(
            f"the ranks hold {rows} tokens, but a rank went ahead as if all held as many, as in an earlier "
            f"call: where the length n of sequences changes, give mask & Mask.documents([0, n])"
        )
    return rows if uneven else None
