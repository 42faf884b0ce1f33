"""Numbered calls of one ring: all ranks make the same, in the same order, or every rank gets an error.

At the start of a call ranks exchange 40 bytes each: its number, digests of its signature, its rows. A thread
makes the exchanges, one after another. A call waits for its own exchange, or goes ahead and is looked at
later. Where the integers differ, the signatures follow by the store, and the error names ranks and fields. A
rank that refuses its call leaves its error in the store, where waiting ranks look.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.agreement.claims import Signature, differences, digest_of_items
from burst_mcore.agreement.exchange import LOOK_EVERY, Gathering

logger = logging.getLogger("burst_mcore")

ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""
LAST_LOOK = 0.1
"""How many seconds each signature is looked for when that time is over."""
VERDICT_WITHIN = timedelta(seconds=5)
"""How long a rank whose hop failed waits to hear whether the ranks disagreed on the call."""

WAITS, REFUSES, AHEAD = range(3)
"""The first integer of a rank: how it comes to a call."""
_REFUSED = (REFUSES, 0, 0, 0, 0)
"""The integers of a rank that refused its call."""
_FAILED = "failed"
"""The key of the store where a rank whose pass failed tells so."""


DESTROYED = "the process groups of this ring were destroyed: make new ones, and their Topology.from_group"
"""What a call on a closed ring is told."""


class Latest(dict[Any, Any]):
    """A dictionary of the entries that were made last."""

    MOST = 1024

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self.MOST:
            del self[next(iter(self))]


class Agreed(NamedTuple):
    """A call on which the ranks agree, or that goes ahead and will be looked at."""

    number: int
    lengths: list[int] | None
    """The rows of every rank, if they differ."""
    label: int
    """The same on all ranks that make this call, and another for nearly every other call."""


class Agreement:
    """The agreements of one ring. Every rank keeps one for each control group.

    Calls are numbered, refused ones too, so that ranks know which of them are the same. No other collective
    may use the control group. A disagreement on a call that no rank made ahead leaves the ring as it was.
    After any other the ring is broken: messages of that call are under way, and every later call is refused.

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
        self.group = group
        self._rank, self._size, self._abort = rank, len(ranks), abort
        self._exchange = Gathering(
            group, ranks, rank, absent=_REFUSED, look=self._look, fail=self._leave_failure
        )
        self._store = PrefixStore(f"burst_mcore/{group.group_name}", _get_default_store())
        self._calls = 0
        self._last: _Meeting | None = None
        self._failure: Exception | None = None
        """Why no call may follow."""
        self._told = False
        """Whether the caller has seen the failure."""
        self._in_pass = self._stopping = False
        self._worker: threading.Thread | None = None
        self._meetings: queue.SimpleQueue[_Meeting | None] = queue.SimpleQueue()
        self._at = 0
        """The number of the call whose exchange is under way."""
        self._seen = Latest()

    def seen(self, description: object) -> bool:
        """Return whether `remember` was called with this description of a call."""
        return description in self._seen

    def remember(self, description: object) -> None:
        """Note a description of a call on which the ranks have agreed in full."""
        self._seen[description] = True

    def agree(self, signature: Signature, *, ahead: bool = False) -> Agreed:
        """Return once every rank of the ring has come with the same signature; at once if `ahead`.

        Raises:
            ValueError: signatures differ (names each field and who has what), or a rank refused its call.
            RuntimeError: a rank has gone, or did not come within the group's time-out; an earlier call failed
                in mid-ring; the agreement is closed.
        """
        return self.meet(signature, {}, 0, ahead=ahead)

    def meet(self, signature: Signature, if_even: Signature, rows: int, *, ahead: bool = False) -> Agreed:
        """Agree as `agree` does; `if_even` must be the same as well, but only if every rank has as many rows.

        A call that goes ahead takes for granted that every rank has as many.
        """
        self._begin()
        with self._present():
            digests = digest_of_items(tuple(signature.items())), digest_of_items(tuple(if_even.items()))
            row = (AHEAD if ahead else WAITS, self._calls, *digests, rows)
            meeting = self._post(_Meeting(row, {"call": str(self._calls), **signature, **if_even}))
            label = hash((self._calls, *digests))
            if ahead:
                return Agreed(self._calls, None, label)
            meeting.done.wait()
        if meeting.error is not None:
            self._told |= meeting.error is self._failure
            raise meeting.error
        return Agreed(self._calls, meeting.lengths, label)

    def settle(self) -> None:
        """Wait until every call that went ahead has been looked at; raise the error of any.

        Raises:
            ValueError, RuntimeError: as `agree`.
        """
        if self._last is not None:
            with self._present():
                self._last.done.wait()
        self._raise_untold()

    def least(self, value: float) -> float:
        """Return the least of all ranks' values. In a call that all have agreed to make."""
        (bits,) = struct.unpack("q", struct.pack("d", value))
        everyones = self.meet({"pass": "least of all"}, {}, bits).lengths or [bits]
        return float(min(struct.unpack("d", struct.pack("q", each))[0] for each in everyones))

    def refuse(self, error: BaseException) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._calls += 1
        self._leave_refusal(self._calls, error)
        self._post(_Meeting((REFUSES, self._calls, 0, 0, 0), {}))

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap a pass: after one that fails, its messages are still on their way, and no call may follow."""
        self._in_pass = True
        try:
            yield
        except BaseException as error:
            meeting = self._last
            if isinstance(error, RuntimeError) and meeting is not None and meeting.ahead:
                meeting.done.wait(VERDICT_WITHIN.total_seconds())  # a hop fails of a disagreement, too
            if type(error) is RuntimeError and self._failure is None:  # a hop; out of memory is a subclass
                self._failure = self._failed_pass()
            failure, self._told = self._failure, True
            if failure is None:
                self._fail(error, "failed in mid-ring")
            elif isinstance(error, Exception):  # no interrupt
                raise failure from error
            raise
        finally:
            self._in_pass = False

    def close(self) -> None:
        """Stop the thread of the exchanges. No call may follow."""
        self._stopping = True
        self._meetings.put(None)
        if self._worker is not None:
            self._worker.join(2 * LOOK_EVERY.total_seconds())

    @contextlib.contextmanager
    def _present(self) -> Iterator[None]:
        """Wrap a wait for the others: a rank that is interrupted leaves them, perhaps in the ring."""
        try:
            yield
        except BaseException as error:  # KeyboardInterrupt, or the error of a signal handler
            if not self._in_pass:  # else `ring` tells
                self._told = True
                self._fail(error, "was interrupted while it waited for the others")
            raise

    def _fail(self, error: BaseException, how: str) -> None:
        """Let no call follow on any rank. The others look for the text, in their waits and their passes."""
        self._failure = RuntimeError(_text_of(error))
        text = f"rank {self._rank} of the ring {how}: {_text_of(error)}"
        with contextlib.suppress(RuntimeError):  # a store whose process is gone
            self._store.compare_set(_FAILED, "", text)  # the first rank that fails has the cause

    def _begin(self) -> None:
        """Number the call. Refuse it if an earlier one failed."""
        if self._stopping:
            raise RuntimeError(DESTROYED)
        if isinstance(self._failure, ValueError):  # names ranks and fields; others are told below
            self._raise_untold()
        if self._failure is not None:
            error = RuntimeError(
                f"an earlier call failed in mid-ring on this rank, or was interrupted, so that messages of "
                f"it may still be on their way: make the process group anew ({self._failure})"
            )
            self.refuse(error)
            raise error
        self._calls += 1

    def _raise_untold(self) -> None:
        """Raise the failure of a call that went ahead, unless the caller has seen it."""
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure

    def _post(self, meeting: _Meeting) -> _Meeting:
        self._last = meeting
        self._meetings.put(meeting)
        if self._worker is None:
            name = f"burst_mcore agreement {self._rank}"
            self._worker = threading.Thread(target=self._work, name=name, daemon=True)
            _RUNNING.add(self)
            self._worker.start()
        return meeting

    def _work(self) -> None:
        """Make the exchanges, in the order of the calls. Meanwhile look for passes of others that failed."""
        while not self._stopping:
            try:
                meeting = self._meetings.get(timeout=LOOK_EVERY.total_seconds())
            except queue.Empty:
                self._look_for_failed_passes()
                continue
            if meeting is not None:
                self._hold(meeting)

    def _hold(self, meeting: _Meeting) -> None:
        self._at = meeting.number
        try:
            failure = self._failure
            if failure is not None and not meeting.refused:  # the pass of an earlier call failed meanwhile
                meeting.error = failure
                self._leave_refusal(meeting.number, failure)
            if failure is not None or meeting.refused:
                self._exchange.stay_in_step()
                return
            table = self._exchange.integers(meeting.row)
            try:
                meeting.lengths = self._compare(table, meeting)
            except ValueError as error:
                if any(row[0] == AHEAD for row in table):
                    self._break(error)
                raise
        except Exception as error:
            meeting.error = meeting.error or error
            if meeting.ahead:
                self._break(error)
        finally:
            meeting.done.set()

    def _compare(self, table: Sequence[Sequence[int]], meeting: _Meeting) -> list[int] | None:
        """Return the rows of all ranks if they differ; raise if the ranks make different calls."""
        if any(row[0] == REFUSES for row in table):
            raise self._error()
        calls, always, even, lengths = (len({row[column] for row in table}) for column in (1, 2, 3, 4))
        uneven = lengths > 1
        if calls > 1 or always > 1 or (even > 1 and not uneven):
            raise ValueError(
                f"the ranks of the ring make different calls: {self._differences(meeting.signature)}"
            )
        if uneven and any(row[0] == AHEAD for row in table):
            rows = [row[4] for row in table]
            raise ValueError(f"the ranks hold {rows} tokens, but a rank went ahead as if all held as many")
        return [row[4] for row in table] if uneven else None

    def _break(self, error: Exception) -> None:
        """End the ring: a call went ahead that not all ranks make, so its messages never come."""
        if self._failure is None:
            self._failure = error
            if self._stopping:
                return
            logger.error("%s", error)
            try:
                self._abort()
            except Exception:  # the thread must go on: it tells the others of calls that this rank refuses
                logger.exception("waits for messages of the ring could not be ended")

    def _look_for_failed_passes(self) -> None:
        error = self._failed_pass() if self._in_pass and self._failure is None else None
        if error is not None:
            self._break(error)

    def _failed_pass(self) -> RuntimeError | None:
        """Return the error of the first rank whose pass failed, if any told so."""
        with contextlib.suppress(RuntimeError):  # a store whose process is gone
            if self._store.check([_FAILED]):
                return RuntimeError(self._store.get(_FAILED).decode())
        return None

    def _look(self) -> None:
        """Raise the error that a rank has left for this call, or of a pass that failed, if there is one.

        The store goes with its process.
        """
        if self._stopping:
            raise RuntimeError(f"the process of rank {self._rank} of the ring ends")
        try:
            left = self._store.check([self._key("error")])
        except RuntimeError as error:
            raise self._exchange.gone(error) from error
        if left:
            raise self._error() from None
        failed = self._failed_pass()  # a rank that failed in an earlier call may never come to this one
        if failed is not None:
            raise failed from None

    def _leave_failure(self, error: BaseException) -> None:
        """Tell the other ranks why the hub stopped waiting, unless a rank has told them already."""
        if not isinstance(error, ValueError):
            text = str(error) if isinstance(error, RuntimeError) else _text_of(error)
            self._leave(self._at, text, gone=True)

    def _leave_refusal(self, call: int, error: BaseException) -> None:
        self._leave(call, f"rank {self._rank} of the ring refused this call: {_text_of(error)}")

    def _leave(self, call: int, text: str, *, gone: bool = False) -> None:
        """Leave an error for the other ranks. A call has one: of several, the last is read."""
        with contextlib.suppress(RuntimeError):  # a store whose process is gone: nobody can be told
            self._store.set(f"error/{call}", json.dumps([gone, text]))

    def _error(self) -> ValueError | RuntimeError:
        gone, text = json.loads(self._store.get(self._key("error")))
        return RuntimeError(text) if gone else ValueError(text)

    def _differences(self, signature: Signature) -> str:
        """Return the fields that differ. Signatures go through the store: some ranks may not come."""
        self._store.set(self._key(f"signature/{self._rank}"), json.dumps(signature))
        deadline = time.monotonic() + ANSWER_WITHIN.total_seconds()  # of all together, however many are gone
        return differences({rank: self._signature(rank, deadline) for rank in range(self._size)})

    def _signature(self, rank: int, deadline: float) -> Signature:
        key = self._key(f"signature/{rank}")
        left = max(deadline - time.monotonic(), LAST_LOOK)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError:
            return {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        signature: Signature = json.loads(self._store.get(key))
        return signature

    def _key(self, topic: str) -> str:
        return f"{topic}/{self._at}"


class _Meeting:
    """One exchange: the integers and the signature of this rank, and its result once it is done."""

    def __init__(self, row: tuple[int, ...], signature: Signature) -> None:
        self.row, self.signature = row, signature
        self.done = threading.Event()
        self.lengths: list[int] | None = None
        self.error: Exception | None = None

    @property
    def number(self) -> int:
        return self.row[1]

    @property
    def refused(self) -> bool:
        return self.row[0] == REFUSES

    @property
    def ahead(self) -> bool:
        return self.row[0] == AHEAD


_RUNNING: weakref.WeakSet[Agreement] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all threads before the interpreter ends: one that wakes afterwards would abort the process."""
    for each in list(_RUNNING):
        each.close()


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
