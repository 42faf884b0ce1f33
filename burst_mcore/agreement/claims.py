"""What ranks compare: the claims of ranks, their words on a call, and texts for how they differ. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from burst_mcore.words import digest

Signature = dict[str, str]
"""By field, values that must be the same on all ranks."""
WAITS, REFUSES, AHEAD = range(3)
"""How a rank comes to a call."""


class Claim(NamedTuple):
    """What one rank brings: the signature of its call, or the error for which it makes none."""

    signature: Signature
    error: str | None = None


class Word(NamedTuple):
    """The integers with which a rank comes to a numbered call."""

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


def summary(claim: Claim) -> tuple[int, int]:
    """Return the integers that ranks compare first: whether there is an error, and the signature's digest."""
    return int(claim.error is not None), digest_of(claim.signature)


def alike(summaries: Sequence[Sequence[int]]) -> bool:
    """Return whether no rank has an error and all have the same signature; other integers do not count."""
    return len({tuple(each[:2]) for each in summaries}) == 1 and not summaries[0][0]


def disagreement(claims: Mapping[int, Claim]) -> str | None:
    """Return why ranks, which bring these claims, do not agree; None if they do.

    Errors come before differences: "rank 1: labels must be int64". Without errors, the values of the fields
    that differ follow: "ranks make different calls: ranks [0, 2]: mean; ranks [1]: sum".
    """
    errors = [f"rank {rank}: {claim.error}" for rank, claim in claims.items() if claim.error is not None]
    if errors:
        return "; ".join(errors)
    differing = list(_differing({rank: claim.signature for rank, claim in claims.items()}))
    if not differing:
        return None
    values = {
        rank: ", ".join(claim.signature[field] for field, _ in differing if field in claim.signature)
        for rank, claim in claims.items()
    }
    groups = (f"ranks {ranks}: {value}" for value, ranks in ranks_by_value(values).items())
    return f"ranks make different calls: {'; '.join(groups)}"


def differences(signatures: Mapping[int, Signature]) -> str:
    """Return each field that differs, with the ranks of each value; a rank without the field has "nothing".

    For instance "layout: zigzag on ranks [0], striped on ranks [1]; softcap: 5.0 on ranks [0], ...".
    """
    return "; ".join(
        f"{field}: {', '.join(f'{value} on ranks {ranks}' for value, ranks in by_value.items())}"
        for field, by_value in _differing(signatures)
    )


def ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each value, in the order of the first of them."""
    return {value: [rank for rank in values if values[rank] == value] for value in values.values()}


def _differing(signatures: Mapping[int, Signature]) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yield each field that differs between ranks, and the ranks of each value."""
    for field in dict.fromkeys(field for signature in signatures.values() for field in signature):
        by_value = ranks_by_value({rank: each.get(field, "nothing") for rank, each in signatures.items()})
        if len(by_value) > 1:
            yield field, by_value


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
