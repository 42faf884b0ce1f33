"""`Watch`, the thread by which a rank of a ring exchanges claims, one after another, and sees failures."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from burst_mcore.agreement.claims import AHEAD, WAITS, Claim, OthersError, numbers_of
from burst_mcore.latest import Latest

LOOK_EVERY = timedelta(seconds=1)
"""How often a thread looks around while it waits."""
WARN_AFTER = 10.0
"""Seconds after which a rank that waits at a sync point logs which ranks are absent."""
MESSAGES = "send", "recv", "isend", "irecv", "batch_isend_irecv"
"""Functions of torch.distributed that not all ranks of a group call."""
DESTROYED = "the process groups of this ring were destroyed: make new ones, and their Topology.from_group"

logger = logging.getLogger("burst_mcore")


@dataclass(eq=False)
class Meeting:
    """A numbered meeting as this rank comes to it; answer: numbers of all ranks, or why they do not agree."""

    number: int
    claim: Claim
    word: list[int]
    answer: Any = None


class Watch:
    """The thread of one rank, which takes its meetings one after another until the ring has failed.

    An error of one meeting alone is an OthersError, if nobody went ahead. Any other is a failure, which ends
    the ring on all ranks. The thread and the caller's share the queue of meetings, their answers and the
    failure, under the lock of `_changed`. Ranks leave notes in the store: "failure" of the ring, "refusal/N"
    of meeting N, for ranks that come when the one that refused has ended, "at/r", where rank r was last.

    `ranks` are the ring's global ranks in its order, `rank` is this rank's place among them. Nothing else may
    use their gloo `group`. `abort` ends the waits of this rank for messages of the ring.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, abort: Callable[[], None]
    ) -> None:
        self._group, self._rank, self._abort = group, rank, abort
        self._order = [dist.get_group_rank(group, each) for each in ranks]
        """Where the ranks of the ring stand in the group."""
        self._store = c10d.PrefixStore(f"burst_mcore/{group.group_name}", c10d._get_default_store())
        self._changed = threading.Condition()
        self._queue: deque[Meeting] = deque()
        self._failure: BaseException | None = None
        """Why no call may follow, if that is so."""
        self._seen = Latest()
        """Kinds of claims on which all ranks have agreed. This, and `_last`, is of the caller's thread."""
        self._last = self._meeting = Meeting(0, Claim({}), [], answer=[[]])
        """The last meeting of the caller's thread, and of this one."""
        self._thread = threading.Thread(target=self._work, name=f"burst_mcore agreement {rank}", daemon=True)
        self._thread.start()
        # A thread that wakes after the interpreter's end would abort the process.
        atexit.register(self.close, "the process of this rank ends")

    def close(self, why: str = DESTROYED) -> None:
        """Stop the thread, also one that looks late, on a busy machine. No call may follow."""
        atexit.unregister(self.close)
        self._stop(RuntimeError(why))
        self._thread.join(10 * LOOK_EVERY.total_seconds())

    def _stop(self, error: BaseException | None, *, tell: bool = False) -> bool:
        """Let no call follow on this rank, nor on any if `tell`; return whether it is the first error."""
        with self._changed:
            first = self._failure is None
            self._failure = self._failure or error
            self._changed.notify_all()
        if tell and first:
            note = json.dumps([isinstance(error, ValueError), str(error)])
            with contextlib.suppress(RuntimeError):
                self._store.compare_set("failure", "", note)  # the first of all ranks has the cause
        return first

    def _failure_told(self) -> Exception | None:
        """Return why no call may follow, if any rank told so. Raises RuntimeError if the store has ended."""
        if not self._store.check(["failure"]):
            return None
        differ, text = json.loads(self._store.get("failure"))
        return ValueError(text) if differ else RuntimeError(text)

    def _work(self) -> None:
        """Exchange claims, meeting after meeting, until the ring has failed: the thread's function."""
        try:
            while True:
                self._meeting = meeting = self._next()
                if "at" in meeting.claim.signature:
                    self._leave_place(meeting.claim.signature["at"])
                words = self._exchanged(meeting.word)
                try:
                    answer: Any = numbers_of(words, meeting.claim, self._exchanged, range(len(words)))
                except OthersError as error:
                    if AHEAD in [how for how, *_ in words]:
                        raise
                    answer = error
                with self._changed:
                    meeting.answer = answer
                    self._changed.notify_all()
        except BaseException as error:
            if self._stop(error, tell=True):
                logger.error("%s", error)
                self._abort()  # messages may never come

    def _next(self) -> Meeting:
        """Return the next meeting; until it comes, tell where the main thread waits."""
        place = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._failure, LOOK_EVERY.total_seconds())
                if self._queue and self._failure is None:
                    return self._queue.popleft()
            self._look()
            before, place = place, place_of_main_thread()
            if place is not None and place == before:  # at two looks: not on its way through
                self._leave_place(*place)

    def _exchanged(self, integers: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, which brings as many, by its place on the ring.

        A gather to the hub and a broadcast: gloo's all-reduce takes 2 (G - 1) messages, one after another.
        """
        row, is_hub = torch.tensor(integers), self._order[self._rank] == 0
        table = torch.empty(len(self._order), len(row), dtype=torch.int64)
        rows = list(table.unbind()) if is_hub else None
        gathering = dist.gather(row, rows, group=self._group, group_dst=0, async_op=True)
        if is_hub:
            self._until(gathering)
        self._until(dist.broadcast(table, group=self._group, group_src=0, async_op=True))
        return table[self._order].tolist()

    def _until(self, work: Any) -> None:
        """Wait until gloo's work is complete; look around meanwhile, for late ranks ever more rarely."""
        start, patience = time.monotonic(), 1.0
        while True:
            complete = work.is_completed()
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError as error:  # LOOK_EVERY has passed, or the work has failed
                self._look()  # a rank may have told why
                if complete:
                    raise self._gone(error) from error
            seconds = time.monotonic() - start
            if self._meeting.word[0] == WAITS and seconds > patience:
                patience *= 1.5
                self._look_for_late(seconds)

    def _look(self) -> None:
        """Raise the failure of any rank; in a meeting the loss of the store is one, too."""
        try:
            failure = self._failure or self._failure_told()
        except RuntimeError as lost:
            failure = None if self._meeting.answer else self._gone(lost)
        if failure is not None:
            raise failure

    def _leave_place(self, place: str, group: str = "", collective: int = 0) -> None:
        """Note where this rank is, for the others, if the store has not ended."""
        note = [self._meeting.number, f"rank {self._rank}, last at {place}", group, collective]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"at/{self._rank}", json.dumps(note))

    def _late(self) -> list[tuple[str, str, int]]:
        """Return where ranks without a sync point since this meeting were last: text, group, collective."""
        notes: list[Any] = []
        for rank in range(len(self._order)):
            notes.append([0, f"rank {rank}, last at no sync point", "", 0])
            with contextlib.suppress(RuntimeError):
                if self._store.check([f"at/{rank}"]):
                    notes[-1] = json.loads(self._store.get(f"at/{rank}"))
        return [(*note,) for number, *note in notes if number < self._meeting.number]

    def _look_for_late(self, seconds: float) -> None:
        """Raise RuntimeError if a rank waits elsewhere for this one; log which ranks have not come."""
        late, here = self._late(), self._meeting.claim.signature.get("at")
        for text, name, number in late:
            same: list[Any] = [group for group in c10d._world.pg_names if group.group_name == name]
            if any(group._get_sequence_number_for_group() < number for group in same):
                raise RuntimeError(f"{text}, waits for rank {self._rank}, which waits at {here or 'a call'}")
        if here and seconds > WARN_AFTER:
            logger.warning("after %d s %s", seconds, self._stands(here, late))

    def _stands(self, here: str, late: list[tuple[str, str, int]]) -> str:
        absent = "; ".join([text for text, *_ in late]) or "a message"
        return f"rank {self._rank} of {len(self._order)} waits at {here}, for {absent}"

    def _gone(self, error: RuntimeError) -> Exception:
        """Return why an exchange failed: a rank has gone, which may have refused the call before."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([refusal := f"refusal/{self._meeting.number}"]):
                return ValueError(self._store.get(refusal).decode())  # a failure: the others may wait
        text = "another rank of the ring has gone or did not come to this call"
        here = self._meeting.claim.signature.get("at")
        who = self._stands(here, self._late()) if here else f"rank {self._rank} of {len(self._order)}"
        return RuntimeError(f"{who}: {text}; look for the first error of all ranks ({error})")


def place_of_main_thread() -> tuple[str, str, int] | None:
    """Return where the main thread waits in a collective: "all_reduce at train.py:41", group, number."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in MESSAGES:
        return None
    name, group = frame.f_code.co_name, frame.f_locals.get("group", ...)
    if not hasattr(group, "_get_sequence_number_for_group"):
        return None
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch."):
        frame = frame.f_back
    place = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    return place, group.group_name, group._get_sequence_number_for_group()
