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
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from burst_mcore.agreement.board import Board, Stand, text_of
from burst_mcore.agreement.claims import AHEAD, REFUSES, WAITS, Signature, Word, lengths_of
from burst_mcore.agreement.exchange import LOOK_EVERY, Gathering

WARN_AFTER = 10.0
"""Seconds after which a rank that waits at a place of its program logs which ranks are absent."""

logger = logging.getLogger("burst_mcore")


class Meeting(NamedTuple):
    """One exchange: this rank's word and signature, and the result, which is set by the thread."""

    word: Word
    signature: Signature
    place: int
    """The number of the place to which the program has come (`Agreement.come_to`); 0: a call."""
    lengths: Future[list[int] | None]
    """The rows of all ranks if they differ, or an error."""


class Watch:
    """The thread of one rank, and the state that it shares with the thread that makes the calls."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], board: Board, abort: Callable[[], None]
    ) -> None:
        self._board, self._abort = board, abort
        self._exchange = Gathering(
            group, ranks, board.rank, absent=Word(REFUSES), look=self._look, fail=self._leave_error
        )
        self.in_pass = self.stopping = False
        """Written by the thread that makes the calls."""
        self.failure: Exception | None = None
        """Why no call may follow, if that is so; written by `fail`."""
        self._failing = threading.Lock()
        self.meetings: queue.SimpleQueue[Meeting | None] = queue.SimpleQueue()
        """The exchanges that the thread is to make; None wakes it."""
        self._under_way = Meeting(Word(REFUSES), {}, 0, Future())
        self._warn_at = 0.0
        self._stand: Stand | None = None
        """The collective of other code in which the main thread stood at the last look."""
        name = f"burst_mcore agreement {board.rank}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def fail(self, error: Exception) -> bool:
        """Let no call follow, from either thread; return whether this reason is the first, which counts."""
        with self._failing:
            first = self.failure is None
            self.failure = self.failure or error
        return first

    def start(self) -> None:
        """Start the thread, at the first exchange."""
        _RUNNING.add(self)
        self.thread.start()

    def close(self) -> None:
        """Stop the thread. A thread that looks late, on a busy machine, is waited for."""
        self.stopping = True
        self.meetings.put(None)
        if self.thread.ident is not None:
            self.thread.join(10 * LOOK_EVERY.total_seconds())

    def _work(self) -> None:
        """Make the exchanges, in the order of the calls. Meanwhile look for passes of others that failed."""
        while not self.stopping:
            try:
                meeting = self.meetings.get(timeout=LOOK_EVERY.total_seconds())
            except queue.Empty:
                self._look_around()
                continue
            if meeting is not None:
                self._hold(meeting)

    def _look_around(self) -> None:
        """In a pass: end its waits if another rank failed. Else tell where this rank stands."""
        if self.in_pass and self.failure is None:
            error = self._board.failed_pass()
            if error is not None:
                self._break(error)
        elif not self.in_pass:
            before, self._stand = self._stand, stand_of_main_thread()
            if self._stand is not None and self._stand == before:  # at two looks: not on its way through
                self._board.leave("stand", self._under_way.word.call, self._board.rank, *self._stand)

    def _hold(self, meeting: Meeting) -> None:
        self._under_way = meeting
        self._warn_at = time.monotonic() + WARN_AFTER if meeting.place else float("inf")
        try:
            meeting.lengths.set_result(self._lengths(meeting.word, meeting.signature))
        except BaseException as error:  # whatever ends the thread: a caller waits for the result
            if isinstance(error, Exception) and meeting.word.how == AHEAD:
                self._break(error)
            meeting.lengths.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _lengths(self, word: Word, signature: Signature) -> list[int] | None:
        """Exchange words; return the rows of all ranks if they differ. Raise if the ranks do not agree."""
        failure = self.failure
        if failure is not None and word.how != REFUSES:  # the pass of an earlier call failed meanwhile
            self._board.leave_refusal(word.call, failure)
        if failure is not None or word.how == REFUSES:
            with contextlib.suppress(RuntimeError):  # the others have gone
                self._exchange.stay_in_step()
            if failure is not None:
                raise failure
            return None
        words = [Word(*each) for each in self._exchange.integers(word)]
        hows = {each.how for each in words}
        try:
            if REFUSES in hows:
                raise self._board.error(word.call)
            return lengths_of(words, lambda: self._board.signatures(word.call, signature))
        except ValueError as error:
            if AHEAD in hows:
                self._break(error)
            raise

    def _break(self, error: Exception) -> None:
        """End the ring: a call went ahead that not all ranks make, so its messages never come."""
        if self.fail(error) and not self.stopping:
            logger.error("%s", error)
            try:
                self._abort()
            except Exception:  # the thread must go on: it tells the others of calls that this rank refuses
                logger.exception("waits for messages of the ring could not be ended")

    def _look(self) -> None:
        """Raise an error that ends the wait for the others, if there is one."""
        word, rank = self._under_way.word, self._board.rank
        if self.stopping:
            raise RuntimeError(f"the process of rank {rank} of the ring ends")
        try:
            error = self._board.look(word.call)
        except RuntimeError as lost:
            raise self._exchange.gone(lost) from lost
        if error is not None:
            raise error from None
        if word.how == WAITS:  # the main thread waits for this call, and begins nothing
            stood = stand_before(word.call, self._board)
            if stood is not None:
                error = RuntimeError(f"{stood} waits for rank {rank}, which waits here")
                self._board.leave_failure(error, "cannot go on")
                raise error
        if time.monotonic() > self._warn_at:
            self._warn_at = float("inf")
            place, absent = self._under_way.signature["at"], self._board.absent(self._under_way.place)
            text = "rank %d of the sequence has waited for %d s at %s, for %s"
            logger.warning(text, rank, WARN_AFTER, place, absent or "a message")

    def _leave_error(self, error: BaseException) -> None:
        """Tell the other ranks why the hub stopped waiting, unless a rank has told them already."""
        if not isinstance(error, ValueError):
            text = str(error) if isinstance(error, RuntimeError) else text_of(error)
            self._board.leave(f"error/{self._under_way.word.call}", True, text)


def stand_of_main_thread() -> Stand | None:
    """Return the collective of torch.distributed that the main thread has called and that has not ended."""
    messages = ("send", "recv", "isend", "irecv", "batch_isend_irecv")  # which not all ranks of a group call
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in messages:
        return None
    name, group = frame.f_code.co_name, frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return None
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch."):
        frame = frame.f_back
    text = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    return Stand(group.group_name, _begun(group), text)


def stand_before(call: int, board: Board) -> str | None:
    """Return the stand of a rank that came to no such call, in a collective that this rank has not begun."""
    note = board.find("stand")
    if note is None or note[0] >= call:
        return None
    _, rank, name, number, text = note
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
        each.close()
