"""The board of a ring: notes that its ranks leave in a store, for other ranks to find while they wait."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from burst_mcore.agreement.claims import Signature

ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""
LAST_LOOK = 0.1
"""How many seconds each signature is looked for when that time is over."""


class Stand(NamedTuple):
    """A collective in which the main thread waits. Those of a group are numbered, alike on its ranks."""

    group: str
    number: int
    text: str
    """For instance "all_reduce at train.py:41"."""


class Board:
    """Errors and signatures of numbered calls of one ring, a pass that failed, and places of programs.

    The store ends with its process. Notes that cannot be left then are dropped: nobody is there to read them.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def leave(self, key: str, *values: Any) -> None:
        """Leave a note for the other ranks; of several with the same key the last is read."""
        with contextlib.suppress(RuntimeError):
            self.store.set(key, json.dumps(values))

    def find(self, key: str) -> list[Any] | None:
        """Return the values of a note; None if there is none, or if the store has ended."""
        with contextlib.suppress(RuntimeError):
            return list(json.loads(self.store.get(key))) if self.store.check([key]) else None
        return None

    def leave_refusal(self, call: int, error: BaseException) -> None:
        """Tell the ranks that wait in a call that this one refuses it."""
        text = f"rank {self.rank} of the ring refused this call: {text_of(error)}"
        self.leave(f"error/{call}", False, text)

    def error(self, call: int) -> Exception:
        """Return the error that a rank leaves for this call; wait until it does."""
        gone, text = json.loads(self.store.get(f"error/{call}"))
        return RuntimeError(text) if gone else ValueError(text)

    def look(self, call: int) -> Exception | None:
        """Return the error that a rank has left for this call, or of a pass that failed, if there is one.

        Raises RuntimeError if the store has ended.
        """
        if self.store.check([f"error/{call}"]):
            return self.error(call)
        return self.failed_pass()  # a rank that failed in an earlier call may never come to this one

    def leave_failure(self, error: BaseException, how: str) -> None:
        """Tell the others, in their waits and their passes, that no call may follow."""
        text = f"rank {self.rank} of the ring {how}: {text_of(error)}"
        with contextlib.suppress(RuntimeError):
            self.store.compare_set("failed", "", json.dumps([text]))  # the first that fails has the cause

    def failed_pass(self) -> RuntimeError | None:
        """Return the error of the first rank whose pass failed, if any told so."""
        note = self.find("failed")
        return RuntimeError(*note) if note else None

    def absent(self, count: int) -> str:
        """Return the ranks that have come to fewer places, each with its last: "rank 1, last at cp.shard"."""
        notes = {rank: self.find(f"place/{rank}") or (0, "no place") for rank in range(self.size)}
        return "; ".join(f"rank {rank}, last at {place}" for rank, (n, place) in notes.items() if n < count)

    def signatures(self, call: int, own: Signature) -> dict[int, Signature]:
        """Return the signatures of all ranks, by rank. Some may not come, and are not waited for long."""
        self.leave(f"signature/{self.rank}/{call}", own)
        deadline = time.monotonic() + ANSWER_WITHIN.total_seconds()  # of all together, however many are gone
        return {rank: self._signature(f"signature/{rank}/{call}", deadline) for rank in range(self.size)}

    def _signature(self, key: str, deadline: float) -> Signature:
        try:
            self.store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), LAST_LOOK)))
        except RuntimeError:
            return {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        return dict(*json.loads(self.store.get(key)))


def text_of(error: BaseException) -> str:
    """Return an error with the name of its class."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
