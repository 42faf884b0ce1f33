"""Numbered calls of one ring: all ranks make the same, in the same order, or every rank gets an error.

At the start of a call ranks exchange 32 bytes each, a `Word`: digests of its number and signature, its rows.
A thread (`watch`) makes the exchanges, one after another. A call waits for its own, or goes ahead and is
looked at later. Where words differ, signatures follow by the store (`board`), and the error names ranks and
fields. A rank that refuses its call, or fails, leaves its error in the store, where waiting ranks look.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.agreement.board import Board
from burst_mcore.agreement.claims import AHEAD, REFUSES, WAITS, Signature, Word, digest_of_items
from burst_mcore.agreement.watch import Meeting, Watch

VERDICT_WITHIN = timedelta(seconds=5)
"""How long a rank whose ring step failed waits to hear whether the ranks disagreed on the call."""

DESTROYED = "the process groups of this ring were destroyed: make new ones, and their Topology.from_group"
"""The error of a call on a closed ring."""


class Latest(dict[Any, Any]):
    """A dictionary of the entries that were made last."""

    MOST = 1024

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self.MOST:
            del self[next(iter(self))]


class Agreed(NamedTuple):
    """A call on which the ranks agree, or that goes ahead and will be looked at."""

    number: int = 0
    lengths: tuple[int, ...] = ()
    """The rows of every rank."""
    label: int = 0
    """The same on all ranks that make this call, and another for nearly every other call."""


class Agreement:
    """The agreements of one ring: a rank meets the others, refuses, guards a pass, or settles.

    Every rank keeps one for each control group, which no other collective may use. Calls are numbered,
    refused ones too, so that ranks know which of them are the same. A disagreement on a call that no rank
    made ahead leaves the ring as it was. After any other the ring is broken: messages of that call are under
    way, and every later call is refused.

    Args:
        group: gloo, over all ranks of the ring.
        ranks: global ranks in the order of the ring; `rank` is this rank's place among them.
        abort: ends the waits of this rank for messages of the ring.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        store = PrefixStore(f"burst_mcore/{group.group_name}", _get_default_store())
        self._board = Board(store, rank, len(ranks))
        self._watch = Watch(group, ranks, self._board, abort)
        self._calls = 0
        self._last: Meeting | None = None
        self._told = False
        """Whether the caller has seen the failure."""
        self._seen = Latest()
        """Kinds of calls on which all ranks have agreed."""

    def meet(
        self,
        signature: Signature,
        if_even: Signature | None = None,
        rows: int = 0,
        *,
        kind: Hashable = None,
        may_go_ahead: bool = False,
        of_call: int = 0,
    ) -> Agreed:
        """Return once every rank of the ring has come with the same signature, or go ahead at once.

        A call goes ahead if it may, and if the ranks have agreed on one of its kind; it takes for granted
        that every rank has as many rows. A backward of autograd settles its calls before it returns.

        Args:
            if_even: fields that must be the same as well, but only if every rank has as many rows.
            of_call: of a backward, the number of its forward, which must be the same, too.

        Raises:
            ValueError: signatures differ (names each field and who has what), or a rank refused its call.
            RuntimeError: a rank has gone, or did not come within the group's time-out; an earlier call failed
                in mid-ring; the agreement is closed.
        """
        self._raise_failure()
        self._calls += 1
        ahead, fields = may_go_ahead and kind in self._seen, if_even or {}
        with self._present():
            always, alike = [digest_of_items(tuple(x.items())) for x in (signature, fields)]
            word = Word(AHEAD if ahead else WAITS, always + self._calls, alike + of_call, rows)
            numbers = {"call": str(self._calls), "of call": str(of_call)}
            meeting = self._post(word, {**numbers, **signature, **fields})
            error = None if ahead else meeting.lengths.exception()
        if error is not None:
            self._told = self._watch.failure is not None
            # A copy: the error that is kept here must not keep the frames, and tensors, of the caller.
            raise copy(error)
        even = (rows,) * self._board.size
        lengths = even if ahead else meeting.lengths.result()
        if kind is not None and lengths == even:
            self._seen[kind] = True
        if ahead and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        return Agreed(self._calls, lengths, hash(word[1:3]))

    def come_to(self, place: str) -> None:
        """Return once every rank of the ring has come to the same place of its program.

        A rank that waits longer than `watch.WARN_AFTER` logs which ranks are absent, and their last places.

        Raises:
            ValueError: at once, on all ranks: some came to another place, or make a call.
            RuntimeError: as `meet`, naming absent ranks and their last places; within seconds if one waits
                for this rank, in a collective of other code.
        """
        call, board = self._calls + 1, self._board
        board.leave(f"place/{board.rank}", [call, place])
        try:
            self.meet({"at": place})
        except RuntimeError as error:
            absent = board.absent(call)
            waits = f", and waits for {absent}" if absent else ""
            raise RuntimeError(f"rank {board.rank} of the sequence is at {place}{waits}: {error}") from error

    def least(self, value: float) -> float:
        """Return the least of all ranks' values. In a call that all have agreed to make."""
        (bits,) = struct.unpack("q", struct.pack("d", value))
        everyones = self.meet({"pass": "least of all"}, rows=bits).lengths
        return float(min(struct.unpack("d", struct.pack("q", each))[0] for each in everyones))

    def settle(self) -> None:
        """Wait until every call that went ahead has been looked at; raise the error of any, as `meet`."""
        if self._last is not None:
            with self._present():
                self._last.lengths.exception()
        self._raise_failure()

    def refuse(self, error: BaseException) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._calls += 1
        text = f"rank {self._board.rank} of the ring refused this call: {_text_of(error)}"
        self._board.leave(f"refusal/{self._calls}", text)
        self._post(Word(REFUSES), {})

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap a pass: after one that fails, its messages are still on their way, and no call may follow."""
        self._watch.in_pass = True  # for ever, if the ring has failed
        self._raise_failure()
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                self._hear_why()  # a message was not sent
            failure, self._told = self._watch.failure, True
            if failure is None:
                self._fail(error, "failed in mid-ring")
            elif isinstance(error, Exception):  # no interrupt
                raise copy(failure) from error
            raise
        else:
            self._raise_failure()  # an abort ends waits on NCCL without an error, and without values
        finally:
            self._watch.in_pass = False

    def close(self) -> None:
        """Stop the thread of the exchanges. No call may follow."""
        self._watch.close(DESTROYED)

    @contextlib.contextmanager
    def _present(self) -> Iterator[None]:
        """Wrap a wait for the others: a rank that is interrupted leaves them, perhaps in the ring."""
        try:
            yield
        except BaseException as error:  # KeyboardInterrupt, or the error of a signal handler
            if not self._watch.in_pass:  # else `ring` tells
                self._told = True
                self._fail(error, "was interrupted while it waited for the others")
            raise

    def _fail(self, error: BaseException, how: str) -> None:
        """Let no call follow on any rank."""
        self._watch.fail(RuntimeError(_text_of(error)))
        text = f"rank {self._board.rank} of the ring {how}: {_text_of(error)}"
        self._board.leave_failure(RuntimeError(text))

    def _hear_why(self) -> None:
        """Wait for what the thread, or another rank, knows of a ring step that failed."""
        with contextlib.suppress(TimeoutError):
            if self._last is not None:  # went ahead, of a disagreement
                self._last.lengths.exception(VERDICT_WITHIN.total_seconds())
        with contextlib.suppress(RuntimeError):
            cause = self._board.failure()
            if cause is not None:
                self._watch.fail(cause)

    def _raise_failure(self) -> None:
        """Raise why no call may follow, if that is so: as it is to a caller who has not seen it."""
        failure = self._watch.failure
        if failure is not None and self._told:
            raise RuntimeError(
                f"an earlier call failed in mid-ring on this rank, or was interrupted, so that messages of "
                f"it may still be on their way: make the process group anew ({failure})"
            )
        if failure is not None:
            self._told = True
            raise copy(failure)

    def _post(self, word: Word, signature: Signature) -> Meeting:
        self._last = Meeting(self._calls, word, signature, Future())
        self._watch.meetings.put(self._last)
        if self._watch.failure is not None:
            self._watch.tell()
        elif self._watch.thread.ident is None:
            self._watch.start()
        return self._last


@contextlib.contextmanager
def refusing(agreement: Agreement | None) -> Iterator[None]:
    """Tell the other ranks if the block fails, so that none of them waits; None: there are no others."""
    try:
        yield
    except BaseException as error:
        if agreement is not None:
            agreement.refuse(error)
        raise


def _text_of(error: BaseException) -> str:
    """Return an error with the name of its class."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
