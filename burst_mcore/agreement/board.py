"""The board of a ring: notes that its ranks leave in a store, for other ranks to find while they wait."""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from burst_mcore.agreement.claims import Signature

ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""


class Board:
    """Refusals and signatures of numbered calls of one ring, its failure, and places of programs.

    The store ends with its process. Notes that cannot be left then are dropped: nobody is there to read them.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def leave(self, key: str, note: Any) -> None:
        """Leave a note for the other ranks; of several with the same key the last is read."""
        with contextlib.suppress(RuntimeError):
            self.store.set(key, json.dumps(note))

    def find(self, key: str) -> Any:
        """Return a note; None if there is none, or if the store has ended."""
        with contextlib.suppress(RuntimeError):
            return json.loads(self.store.get(key)) if self.store.check([key]) else None
        return None

    def leave_failure(self, error: BaseException) -> None:
        """Tell the others, in their waits and their passes, that no call may follow."""
        note = json.dumps([isinstance(error, ValueError), str(error)])
        with contextlib.suppress(RuntimeError):
            self.store.compare_set("failure", "", note)  # the first that fails has the cause

    def failure(self) -> Exception | None:
        """Return why no call may follow, if any rank told so. Raises RuntimeError if the store has ended."""
        if not self.store.check(["failure"]):
            return None
        differ, text = json.loads(self.store.get("failure"))
        return ValueError(text) if differ else RuntimeError(text)

    def absent(self, call: int) -> str:
        """Return the ranks that came to no place since a call, each with its last: "rank 1, last at x"."""
        notes = {rank: self.find(f"place/{rank}") or (0, "no place") for rank in range(self.size)}
        return "; ".join(f"rank {rank}, last at {place}" for rank, (n, place) in notes.items() if n < call)

    def signatures(self, call: int, own: Signature) -> dict[int, Signature]:
        """Return the signatures of all ranks, by rank. Some may not come, and are not waited for long."""
        self.leave(f"signature/{call}/{self.rank}", own)
        keys = [f"signature/{call}/{rank}" for rank in range(self.size)]
        with contextlib.suppress(RuntimeError):
            self.store.wait(keys, ANSWER_WITHIN)  # for all together, however many are gone
        gone = {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        return {rank: self.find(key) or gone for rank, key in enumerate(keys)}
