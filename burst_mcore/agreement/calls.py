"""Numbered calls of one ring: all ranks make the same, in the same order, or every rank gets an error.

At the start of a call ranks exchange 40 bytes each, a `Word`: its number, digests of its signature, its rows.
A thread (`watch`) makes the exchanges, one after another. A call waits for its own, or goes ahead and is
looked at later. Where words differ, signatures follow by the store (`board`), and the error names ranks and
fields. A rank that refuses its call leaves its error in the store, where waiting ranks look.
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

from burst_mcore.agreement.board import Board, text_of
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
    lengths: list[int] | None = None
    """The rows of every rank, if they differ."""
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
        self._calls = self._places = 0
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
        place: int = 0,
    ) -> Agreed:
        """Return once every rank of the ring has come with the same signature, or go ahead at once.

        A call goes ahead if it may, and if the ranks have agreed on one of its kind; it takes for granted
        that every rank has as many rows. A backward of autograd settles its calls before it returns.

        Args:
            if_even: fields that must be the same as well, but only if every rank has as many rows.
            of_call: of a backward, the number of its forward, which must be the same, too.
            place: of `come_to`.

        Raises:
            ValueError: signatures differ (names each field and who has what), or a rank refused its call.
            RuntimeError: a rank has gone, or did not come within the group's time-out; an earlier call failed
                in mid-ring; the agreement is closed.
        """
        self._begin()
        ahead, fields = may_go_ahead and kind in self._seen, if_even or {}
        with self._present():
            always, even = [digest_of_items(tuple(x.items())) for x in (signature, fields)]
            word = Word(AHEAD if ahead else WAITS, self._calls, always, even + of_call, rows)
            numbers = {"call": str(self._calls), "of call": str(of_call)}
            meeting = self._post(word, {**numbers, **signature, **fields}, place)
            error = None if ahead else meeting.lengths.exception()
        if error is not None:
            self._told |= error is self._watch.failure
            # A copy: the error that is kept here must not keep the frames, and tensors, of the caller.
            raise copy(error)
        lengths = None if ahead else meeting.lengths.result()
        if kind is not None and lengths is None:
            self._seen[kind] = True
        if ahead and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        return Agreed(self._calls, lengths, hash(word[1:4]))

    def come_to(self, place: str) -> None:
        """Return once every rank of the ring has come to the same place of its program.

        A rank that waits longer than `watch.WARN_AFTER` logs which ranks are absent, and their last places.

        Raises:
            ValueError: at once, on all ranks: some came to another place, or make a call.
            RuntimeError: as `meet`, naming absent ranks and their last places; within seconds if one waits
                for this rank, in a collective of other code.
        """
        self._places += 1
        self._board.leave(f"place/{self._board.rank}", self._places, place)
        try:
            self.meet({"at": place}, place=self._places)
        except RuntimeError as error:
            absent = self._board.absent(self._places)
            waits = f", and waits for {absent}" if absent else ""
            raise RuntimeError(
                f"rank {self._board.rank} of the sequence is at {place}{waits}: {error}"
            ) from error

    def least(self, value: float) -> float:
        """Return the least of all ranks' values. In a call that all have agreed to make."""
        (bits,) = struct.unpack("q", struct.pack("d", value))
        everyones = self.meet({"pass": "least of all"}, rows=bits).lengths or [bits]
        return float(min(struct.unpack("d", struct.pack("q", each))[0] for each in everyones))

    def settle(self) -> None:
        """Wait until every call that went ahead has been looked at; raise the error of any, as `meet`."""
        if self._last is not None:
            with self._present():
                self._last.lengths.exception()
        self._raise_untold()

    def refuse(self, error: BaseException) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._calls += 1
        self._board.leave_refusal(self._calls, error)
        self._post(Word(REFUSES, self._calls), {})

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap a pass: after one that fails, its messages are still on their way, and no call may follow."""
        watch = self._watch
        watch.in_pass = True
        try:
            yield
        except BaseException as error:
            last = self._last
            if isinstance(error, RuntimeError) and last is not None and last.word.how == AHEAD:
                with contextlib.suppress(TimeoutError):  # a ring step fails of a disagreement, too
                    last.lengths.exception(VERDICT_WITHIN.total_seconds())
            if type(error) is RuntimeError:  # a message was not sent; out of memory is a subclass
                cause = self._board.failed_pass()
                if cause is not None:
                    watch.fail(cause)
            failure, self._told = watch.failure, True
            if failure is None:
                self._fail(error, "failed in mid-ring")
            elif isinstance(error, Exception):  # no interrupt
                raise copy(failure) from error
            raise
        else:
            self._raise_untold()  # an abort ends waits on NCCL without an error, and without values
        finally:
            watch.in_pass = False

    def close(self) -> None:
        """Stop the thread of the exchanges. No call may follow."""
        self._watch.close()

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
        self._watch.fail(RuntimeError(text_of(error)))
        self._board.leave_failure(error, how)

    def _begin(self) -> None:
        """Number the call. Refuse it if an earlier one failed."""
        failure = self._watch.failure
        if self._watch.stopping:
            raise RuntimeError(DESTROYED)
        if isinstance(failure, ValueError):  # names ranks and fields; others are told below
            self._raise_untold()
        if failure is not None:
            error = RuntimeError(
                f"an earlier call failed in mid-ring on this rank, or was interrupted, so that messages of "
                f"it may still be on their way: make the process group anew ({failure})"
            )
            self.refuse(error)
            raise error
        self._calls += 1

    def _raise_untold(self) -> None:
        """Raise the failure of a call that went ahead, unless the caller has seen it."""
        failure = self._watch.failure
        if failure is not None and not self._told:
            self._told = True
            raise copy(failure)

    def _post(self, word: Word, signature: Signature, place: int = 0) -> Meeting:
        self._last = Meeting(word, signature, place, Future())
        self._watch.meetings.put(self._last)
        if self._watch.thread.ident is None:
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
