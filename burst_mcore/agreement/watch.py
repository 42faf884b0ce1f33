"""`Watch`, the thread by which a rank of a ring exchanges words, meeting after meeting, and sees failures."""

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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from burst_mcore.agreement.claims import AHEAD, WAITS, Signature, Told, Word, numbers_of

LOOK_EVERY = timedelta(seconds=1)
"""How often a thread looks around while it waits."""
ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's claims."""
WARN_AFTER = 10.0
"""Seconds after which a rank that waits at a sync point logs which ranks are absent."""
MESSAGES = "send", "recv", "isend", "irecv", "batch_isend_irecv"
"""Functions of torch.distributed that not all ranks of a group call."""
DESTROYED = "the process groups of this ring were destroyed: make new ones, and their Topology.from_group"
"""The error of a call on a closed ring."""

logger = logging.getLogger("burst_mcore")


class GoneError(RuntimeError):
    """A rank has gone. Ranks in mid-ring name their own ring step instead."""


class Latest(dict[Any, Any]):
    """A dictionary of the entries that were made last."""

    MOST = 1024

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self.MOST:
            del self[next(iter(self))]


Answer = Sequence[Word] | BaseException | None
"""The numbers of all ranks, or why they do not agree; None: not yet."""


@dataclass(eq=False)
class Meeting:
    """A numbered meeting as this rank comes to it."""

    number: int
    word: Word
    fields: Signature
    """Of the claim; the name of a sync point, to which all ranks come, is "at"."""
    answer: Answer = None


class Watch:
    """The thread of one rank, which takes its meetings one after another until the ring has failed.

    An error of one meeting alone is a ValueError, if nobody went ahead. Any other error is a failure: it ends
    the thread, the ring, and the other ranks' rings. The thread and the one that makes the calls share the
    queue of meetings, their answers and the failure, under the lock of `_changed`.

    Ranks leave notes in the store: "failure" of the ring, "refusal/N" of meeting N, "claim/N/r" of a meeting
    whose words differ, and "at/r", where rank r was last.

    Args:
        group: gloo, over all ranks of the ring; nothing else may use it.
        ranks: global ranks in the order of the ring; `rank` is this rank's place among them.
        abort: ends the waits of this rank for messages of the ring.
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
        self._last: Meeting | None = None
        """This, and what follows, is of the thread that makes the calls."""
        self._calls = 0
        self._seen = Latest()
        """Kinds of claims on which all ranks have agreed."""
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
            note = json.dumps([type(error).__name__, str(error)])
            with contextlib.suppress(RuntimeError):
                self._store.compare_set("failure", "", note)  # the first of all ranks has the cause
        return first

    def _failure_told(self) -> Exception | None:
        """Return why no call may follow, if any rank told so. Raises RuntimeError if the store has ended."""
        if not self._store.check(["failure"]):
            return None
        kind, text = json.loads(self._store.get("failure"))
        return {"ValueError": ValueError, "GoneError": GoneError}.get(kind, RuntimeError)(text)

    def _leave(self, key: str, note: Any) -> None:
        """Leave a note for the other ranks, if the store has not ended: else nobody is there to read it."""
        with contextlib.suppress(RuntimeError):
            self._store.set(key, json.dumps(note))

    def _leave_place(self, number: int, place: str, group: str = "", collective: int = 0) -> None:
        self._leave(f"at/{self._rank}", [number, f"rank {self._rank}, last at {place}", group, collective])

    def _find(self, key: str, default: Any = None) -> Any:
        """Return a note, if there is one, and the store has not ended."""
        with contextlib.suppress(RuntimeError):
            return json.loads(self._store.get(key)) if self._store.check([key]) else default
        return default

    def _work(self) -> None:
        """Exchange words, meeting after meeting, until the ring has failed: the thread's function."""
        number = 0
        try:
            while True:
                meeting = self._next(number)
                number = meeting.number
                words = self._exchanged(meeting)
                try:
                    claims = partial(self._claims, meeting)
                    self._tell(meeting, numbers_of(words, claims, "the ranks of the ring"))
                except ValueError as error:
                    if AHEAD in [how for how, *_ in words]:
                        raise
                    self._tell(meeting, error)
        except BaseException as error:
            if self._stop(error, tell=True):
                logger.error("%s", error)
                try:
                    self._abort()  # messages may never come
                except Exception:
                    logger.exception("waits for messages of the ring could not be ended")
            if not isinstance(error, Exception):
                raise

    def _tell(self, meeting: Meeting, answer: Answer) -> None:
        """Give the caller the first answer to a meeting."""
        with self._changed:
            meeting.answer = meeting.answer or answer
            self._changed.notify_all()

    def _next(self, number: int) -> Meeting:
        """Return the meeting behind this number; until it comes, tell where the main thread waits."""
        stand = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._failure, LOOK_EVERY.total_seconds())
                if self._queue and self._failure is None:
                    return self._queue.popleft()
            self._look(None)
            before, stand = stand, stand_of_main_thread()
            if stand is not None and stand == before:  # at two looks: not on its way through
                self._leave_place(number, *stand)

    def _exchanged(self, meeting: Meeting) -> list[Word]:
        """Return the words of every rank on a meeting, by its place on the ring.

        A gather to the hub, first rank of the group, and a broadcast: all-reduce takes 2 (G - 1) messages on
        gloo, one after another.
        """
        if "at" in meeting.fields:
            self._leave_place(meeting.number, meeting.fields["at"])
        word, is_hub = torch.tensor(meeting.word), self._order[self._rank] == 0
        table = torch.empty(len(self._order), len(word), dtype=torch.int64)
        rows = list(table.unbind()) if is_hub else None
        gathering = dist.gather(word, rows, group=self._group, group_dst=0, async_op=True)
        if is_hub:
            self._until(gathering, meeting)
        self._until(dist.broadcast(table, group=self._group, group_src=0, async_op=True), meeting)
        words: list[Word] = table[self._order].tolist()
        return words

    def _until(self, work: dist.Work | None, meeting: Meeting) -> None:
        """Wait until gloo's work is complete; look around meanwhile, for late ranks ever more rarely."""
        assert work is not None
        start, patience = time.monotonic(), 1.0
        while not work.is_completed():
            try:
                work.wait(LOOK_EVERY)
            except RuntimeError:  # LOOK_EVERY has passed, or the work has failed: a rank may have told why
                self._look(meeting)
                seconds = time.monotonic() - start
                if meeting.answer is None and meeting.word[0] == WAITS and seconds > patience:
                    patience *= 1.5
                    self._look_for_late(meeting, seconds)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(meeting, error) from error

    def _look(self, meeting: Meeting | None) -> None:
        """Raise the failure of any rank; find why others refuse a meeting."""
        try:
            failure = self._failure or self._failure_told()
        except RuntimeError as lost:
            failure = None if meeting is None else self._gone(meeting, lost)
        if failure is not None:
            raise failure
        refusal = meeting and self._find(f"refusal/{meeting.number}")
        if meeting is not None and refusal is not None:  # it is not kept back until all have come
            if meeting.word[0] == AHEAD:
                raise ValueError(refusal)
            self._tell(meeting, ValueError(refusal))

    def _look_for_late(self, meeting: Meeting, seconds: float) -> None:
        """Raise RuntimeError if a rank waits elsewhere for this one; log which ranks have not come."""
        late, here = self._late(meeting), meeting.fields.get("at", "a call of the ring")
        for text, (name, number) in late.items():
            if any(_begun(group) < number for group in c10d._world.pg_names if group.group_name == name):
                raise RuntimeError(f"{text}, waits for rank {self._rank}, which waits at {here}")
        if "at" in meeting.fields and seconds > WARN_AFTER:
            absent = "; ".join(late) or "a message"
            logger.warning("rank %d has waited for %d s at %s, for %s", self._rank, seconds, here, absent)

    def _late(self, meeting: Meeting) -> dict[str, tuple[str, int]]:
        """Return the last sync points of ranks with none since a meeting, with group and collective."""
        notes = [
            self._find(f"at/{rank}", [0, f"rank {rank}, last at no sync point", "", 0])
            for rank in range(len(self._order))
        ]
        return {place: (group, number) for of, place, group, number in notes if of < meeting.number}

    def _gone(self, meeting: Meeting, error: RuntimeError) -> Exception:
        """Return why an exchange failed."""
        refusal, here = self._find(f"refusal/{meeting.number}"), meeting.fields.get("at")
        if refusal is not None:
            return ValueError(refusal)
        absent = "" if here is None else "; ".join(self._late(meeting)) or "a message"
        waits = "" if here is None else f" is at {here}, and waits for {absent}"
        return GoneError(
            f"rank {self._rank} of {len(self._order)}{waits}: another rank of the ring has gone or did not "
            f"come to this call, before its first ring step; look for the first error among the others "
            f"({error})"
        )

    def _claims(self, meeting: Meeting) -> dict[int, Told]:
        """Return the claims of all ranks, or of one that refuses; the ranks that are gone have none."""
        refusal = self._find(f"refusal/{meeting.number}")
        if refusal is not None:
            return {self._rank: ({}, refusal)}
        self._leave(f"claim/{meeting.number}/{self._rank}", meeting.fields)
        keys = [f"claim/{meeting.number}/{rank}" for rank in range(len(self._order))]
        with contextlib.suppress(RuntimeError):
            self._store.wait(keys, ANSWER_WITHIN)  # for all together, however many are gone
        gone = {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        return {rank: (self._find(key, gone), None) for rank, key in enumerate(keys)}


def stand_of_main_thread() -> tuple[str, str, int] | None:
    """Return the collective in which the main thread waits: text, group, number.

    Collectives of a group are numbered, alike on its ranks. A text is "all_reduce at train.py:41".
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in MESSAGES:
        return None
    name, group = frame.f_code.co_name, frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return None
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch."):
        frame = frame.f_back
    return f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}", group.group_name, _begun(group)


def _begun(group: Any) -> int:
    return int(group._get_sequence_number_for_group())
