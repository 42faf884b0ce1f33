"""The board of a ring: notes that its ranks leave in a store, for other ranks to find while they wait."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import NamedTuple

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
    """Errors and signatures of numbered calls of one ring, a pass that failed, and places of programs."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def leave_refusal(self, call: int, error: BaseException) -> None:
        """Tell the ranks that wait in a call that this one refuses it."""
        self.leave_error(call, f"rank {self.rank} of the ring refused this call: {text_of(error)}")

    def leave_error(self, call: int, text: str, *, gone: bool = False) -> None:
        """Leave an error for the other ranks. A call has one: of several, the last is read."""
        with contextlib.suppress(RuntimeError):  # the store goes with its process: nobody can be told
            self.store.set(f"error/{call}", json.dumps([gone, text]))

    def error(self, call: int) -> Exception:
        """Return the error that a rank leaves for this call; wait until it does."""
        gone, text = json.loads(self.store.get(f"error/{call}"))
        return RuntimeError(text) if gone else ValueError(text)

    def look(self, call: int) -> Exception | None:
        """Return the error that a rank has left for this call, or of a pass that failed, if there is one."""
        if self.store.check([f"error/{call}"]):
            return self.error(call)
        return self.failed_pass()  # a rank that failed in an earlier call may never come to this one

    def leave_failure(self, error: BaseException, how: str) -> None:
        """Tell the others, in their waits and their passes, that no call may follow."""
        text = f"rank {self.rank} of the ring {how}: {text_of(error)}"
        with contextlib.suppress(RuntimeError):
            self.store.compare_set("failed", "", text)  # the first rank that fails has the cause

    def failed_pass(self) -> RuntimeError | None:
        """Return the error of the first rank whose pass failed, if any told so."""
        with contextlib.suppress(RuntimeError):
            if self.store.check(["failed"]):
                return RuntimeError(self.store.get("failed").decode())
        return None

    def leave_place(self, count: int, place: str) -> None:
        """Tell the others the place to which the program of this rank has come; count: of places so far."""
        self.store.set(f"place/{self.rank}", f"{count} {place}")

    def absent(self, count: int) -> str:
        """Return the ranks that have come to fewer places, each with its last: "rank 1, last at cp.shard"."""
        absent = []
        with contextlib.suppress(RuntimeError):  # the store goes with its process: nobody can be asked
            for rank in range(self.size):
                key = f"place/{rank}"
                note = self.store.get(key).decode() if self.store.check([key]) else "0 no place"
                if int(note.split()[0]) < count:
                    absent.append(f"rank {rank}, last at {note.partition(' ')[2]}")
        return "; ".join(absent)

    def leave_stand(self, call: int, stand: Stand) -> None:
        """Tell the ranks that wait in a later call where this one stands."""
        with contextlib.suppress(RuntimeError):
            self.store.set(
                "stand", json.dumps([call, *stand[:2], f"rank {self.rank} of the ring, in {stand.text},"])
            )

    def stand(self, before: int) -> Stand | None:
        """Return where a rank stands that has come to no call from `before` on, if one told so."""
        with contextlib.suppress(RuntimeError):
            if self.store.check(["stand"]):
                call, *stand = json.loads(self.store.get("stand"))
                return Stand(*stand) if call < before else None
        return None

    def signatures(self, call: int, own: Signature) -> dict[int, Signature]:
        """Return what every rank wants to call, by rank. Some may not come, and are not waited for long."""
        self.store.set(f"signature/{self.rank}/{call}", json.dumps(own))
        deadline = time.monotonic() + ANSWER_WITHIN.total_seconds()  # of all together, however many are gone
        return {rank: self._signature(f"signature/{rank}/{call}", deadline) for rank in range(self.size)}

    def _signature(self, key: str, deadline: float) -> Signature:
        try:
            self.store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), LAST_LOOK)))
        except RuntimeError:
            return {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        return dict(json.loads(self.store.get(key)))


def text_of(error: BaseException) -> str:
    """Return an error with the name of its class."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
