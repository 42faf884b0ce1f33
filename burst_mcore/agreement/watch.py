"""The watch of a rank over its ring: a thread that exchanges words, call after call, and sees who failed."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from burst_mcore.agreement.board import Board
from burst_mcore.agreement.claims import AHEAD, REFUSES, WAITS, Signature, Word, lengths_of

LOOK_EVERY = timedelta(seconds=1)
"""How often the thread looks around while it waits."""
WARN_AFTER = 10.0
"""Seconds after which a rank that waits at a place of its program logs which ranks are absent."""
MESSAGES = "send", "recv", "isend", "irecv", "batch_isend_irecv"
"""Functions of torch.distributed that not all ranks of a group call."""

logger = logging.getLogger("burst_mcore")


class Meeting(NamedTuple):
    """A numbered call as this rank comes to it, and its outcome, which the thread sets."""

    call: int
    word: Word
    signature: Signature
    lengths: Future[tuple[int, ...]]
    """The rows of all ranks, or an error."""


class GoneError(RuntimeError):
    """A rank has gone. Ranks that wait for it are told; ranks in a pass name their own ring step."""


class Watch:
    """The thread of one rank, which takes its meetings one after another until the ring has failed.

    An exchange is a gather to the hub, first rank of the group, and a broadcast from it: all-reduce takes
    2 (G - 1) messages on gloo, one after another. An error of one call alone is a ValueError in a meeting
    that nobody went ahead of. Any other error ends the thread, the ring, and the other ranks' rings.

    Args:
        group, ranks, abort: of `Agreement`.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], board: Board, abort: Callable[[], None]
    ) -> None:
        self._group, self._board, self._abort = group, board, abort
        self._order = [dist.get_group_rank(group, each) for each in ranks]
        """Where the ranks of the ring stand in the group."""
        self.in_pass = False
        """Written by the thread that makes the calls."""
        self.failure: BaseException | None = None
        """Why no call may follow, if that is so; written by `fail` alone."""
        self._lock = threading.Lock()
        """Of the failure, which both threads may find."""
        self.meetings: queue.SimpleQueue[Meeting | None] = queue.SimpleQueue()
        """The exchanges that the thread is to make; None wakes it. Behind a failure a caller must `tell`."""
        self._came = 0
        """The last call to which this rank came."""
        self._warn_at = 0.0
        self._stand: tuple[str, int, str] | None = None
        """The collective of other code in which the main thread stood at the last look."""
        name = f"burst_mcore agreement {board.rank}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def fail(self, error: BaseException) -> bool:
        """Let no call follow on this rank; return whether this is the first reason, which counts."""
        with self._lock:
            first = self.failure is None
            self.failure = self.failure or error
        self.meetings.put(None)
        return first

    def start(self) -> None:
        """Start the thread, at the first meeting."""
        _RUNNING.add(self)
        self.thread.start()

    def tell(self) -> None:
        """Give the failure to every queued meeting, and to those who wait for it."""
        with contextlib.suppress(queue.Empty):
            while True:
                meeting = self.meetings.get_nowait()
                if meeting is not None and not meeting.lengths.done():
                    meeting.lengths.set_exception(self.failure)

    def close(self, why: str) -> None:
        """Stop the thread. A thread that looks late, on a busy machine, is waited for."""
        self.fail(RuntimeError(why))
        if self.thread.ident is not None:
            self.thread.join(10 * LOOK_EVERY.total_seconds())

    def _work(self) -> None:
        meeting = None
        try:
            while True:
                meeting = self._next()
                words = self._exchange(meeting)
                hows = {word.how for word in words}
                try:
                    if REFUSES in hows:
                        raise ValueError(self._board.find(f"refusal/{meeting.call}"))
                    signatures = partial(self._board.signatures, meeting.call, meeting.signature)
                    meeting.lengths.set_result(lengths_of(words, signatures))
                except ValueError as error:
                    if AHEAD in hows:
                        raise
                    if not meeting.lengths.done():
                        meeting.lengths.set_exception(error)
        except BaseException as error:
            self._end(error, meeting)
            if not isinstance(error, Exception):
                raise

    def _next(self) -> Meeting:
        """Return the next meeting; look around until it comes."""
        while self.failure is None:
            with contextlib.suppress(queue.Empty):
                meeting = self.meetings.get(timeout=LOOK_EVERY.total_seconds())
                if meeting is not None:
                    self._came = meeting.call
                    return meeting
            self._look(None)
        raise self.failure

    def _end(self, error: BaseException, meeting: Meeting | None) -> None:
        """End the ring: its messages may never come. All who wait for the thread are told why."""
        if self.fail(error):
            if not isinstance(error, GoneError):
                self._board.leave_failure(error)
            elif meeting is not None:
                self._board.leave(f"gone/{meeting.call}", str(error))
            logger.error("%s", error)
            try:
                self._abort()
            except Exception:
                logger.exception("waits for messages of the ring could not be ended")
        self.meetings.put(meeting)
        self.tell()

    def _exchange(self, meeting: Meeting) -> list[Word]:
        """Return the words of every rank on a call, by its place on the ring."""
        self._warn_at = time.monotonic() + WARN_AFTER
        mine, hub = torch.tensor(meeting.word), self._order[self._board.rank] == 0
        table = torch.empty(len(self._order), len(mine), dtype=torch.int64)
        rows = list(table.unbind()) if hub else None
        gathering = dist.gather(mine, rows, group=self._group, group_dst=0, async_op=True)
        if hub:
            self._until(gathering, meeting)
        self._until(dist.broadcast(table, group=self._group, group_src=0, async_op=True), meeting)
        return [Word(*row) for row in table[self._order].tolist()]

    def _until(self, work: dist.Work | None, meeting: Meeting) -> None:
        """Wait until gloo's work is complete; look around meanwhile."""
        assert work is not None
        while not work.is_completed():
            try:
                work.wait(LOOK_EVERY)
            except RuntimeError:  # LOOK_EVERY has passed, or the work has failed: a rank may have told why
                self._look(meeting)
        try:
            work.wait()
        except RuntimeError as error:
            refusal = self._board.find(f"refusal/{meeting.call}")
            raise (self._gone(error) if refusal is None else ValueError(refusal)) from error

    def _look(self, meeting: Meeting | None) -> None:
        """Tell where this rank stands. Raise an error that ends the wait: for a meeting, or for its words."""
        if self.failure is not None:
            raise self.failure
        try:
            failure = self._board.failure()
        except RuntimeError as lost:
            failure = None if meeting is None else self._gone(lost)
        if failure is not None:
            raise failure
        if not self.in_pass:
            before, self._stand = self._stand, stand_of_main_thread()
            if self._stand is not None and self._stand == before:  # at two looks: not on its way through
                self._board.leave("stand", [self._came, self._board.rank, *self._stand])
        if meeting is not None and not meeting.lengths.done():
            self._look_at(meeting)

    def _look_at(self, meeting: Meeting) -> None:
        """Look for what other ranks told of a call, or for why they have not come to it."""
        gone, refusal = [self._board.find(f"{key}/{meeting.call}") for key in ("gone", "refusal")]
        if gone is not None:
            raise GoneError(gone)
        if refusal is not None and meeting.word.how == AHEAD:
            raise ValueError(refusal)
        if refusal is not None:  # others may be late, and are not waited for
            meeting.lengths.set_exception(ValueError(refusal))
        elif meeting.word.how == WAITS:  # the main thread waits for this call, and begins nothing
            self._look_for_the_absent(meeting)

    def _look_for_the_absent(self, meeting: Meeting) -> None:
        """Raise RuntimeError if a rank waits elsewhere for this one; log once which ranks have not come."""
        rank, place = self._board.rank, meeting.signature.get("at")
        stood = stand_before(meeting.call, self._board)
        if stood is not None:
            raise RuntimeError(f"{stood} waits for rank {rank}, which waits here")
        if place is not None and time.monotonic() > self._warn_at:
            self._warn_at = float("inf")
            text = "rank %d of the sequence has waited for %d s at %s, for %s"
            logger.warning(text, rank, WARN_AFTER, place, self._board.absent(meeting.call) or "a message")

    def _gone(self, error: RuntimeError) -> GoneError:
        return GoneError(
            f"on rank {self._board.rank} of {len(self._order)}: another rank of the ring has gone or did not "
            f"come to this call, before its first ring step; look for the first error among the others "
            f"({error})"
        )


def stand_of_main_thread() -> tuple[str, int, str] | None:
    """Return the collective that the main thread has called and that has not ended: group, number, text.

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
    return group.group_name, _begun(group), f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"


def stand_before(call: int, board: Board) -> str | None:
    """Return the stand of a rank that came to no such call, in a collective that this rank has not begun."""
    came, rank, name, number, text = board.find("stand") or (call, 0, "", 0, "")
    if came >= call:
        return None
    if not any(_begun(group) < number for group in c10d._world.pg_names if group.group_name == name):
        return None
    return f"rank {rank} of the ring, in {text},"


def _begun(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


_RUNNING: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all threads before the interpreter ends: one that wakes afterwards would abort the process."""
    for each in list(_RUNNING):
        each.close("the process of this rank ends")
