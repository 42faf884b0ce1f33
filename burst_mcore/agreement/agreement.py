"""`Agreement`, four verbs by which ranks agree, of a rank alone; `Ring`, of the ranks of a ring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch.utils.checkpoint import _StopRecomputationError

from burst_mcore.agreement.claims import AHEAD, NUMBERS, REFUSES, WAITS, Claim, Word, digest_of
from burst_mcore.agreement.watch import Answer, GoneError, Meeting, Watch

VERDICT_WITHIN = 5.0
"""Seconds that a rank whose ring step failed waits to hear whether the ranks disagreed on the call."""


def word_of(claim: Claim, *, ahead: bool = False) -> Word:
    """Return a claim as integers."""
    how = REFUSES if claim.error is not None else AHEAD if ahead else WAITS
    always, if_even = [digest_of(*fields.items()) for fields in (claim.signature, claim.if_even)]
    return [how, always, if_even + claim.of_call, *claim.numbers, *[0] * (NUMBERS - len(claim.numbers))]


class Agreed(NamedTuple):
    """A meeting in which the ranks agree, or from which this rank went ahead, to be looked at later."""

    number: int = 0
    lengths: tuple[int, ...] = ()
    """The first number of every rank: its tokens."""
    label: int = 0
    """The same on all ranks of the meeting, and another for nearly every other meeting."""
    numbers: Sequence[Sequence[int]] = ()
    """The numbers of every rank, filled up with zeros."""


class Agreement:
    """The agreement of ranks that make the same calls in the same order; this one of a rank alone.

    A call has work that this rank does by itself, a meeting, and perhaps messages. Whatever differs or fails
    on a rank, all get an error, and none waits in vain.
    """

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Wrap work before a meeting: an error of it is told to the ranks that meet, or will."""
        try:
            yield
        except BaseException as error:
            self._refuse(error)
            raise

    def meet(self, claim: Claim) -> Agreed:
        """Return once every rank has come with the same claim, or go ahead at once if the claim may.

        Raises:
            ValueError: on all ranks: claims differ (names each field and who has what), or a rank refuses.
            RuntimeError: a rank is gone, or does not come within the group's time-out.
        """
        return Agreed(lengths=claim.numbers[:1], numbers=[claim.numbers])

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap the messages of a call, and work that follows: after an error there no call may follow."""
        yield

    def settle(self) -> None:
        """Wait until every meeting from which this rank went ahead has been looked at; raise its error."""

    def _refuse(self, error: BaseException) -> None:
        """Take part in the meeting of the other ranks with an error."""


ALONE = Agreement()


class Ring(Watch, Agreement):
    """The agreement of the ranks of a ring: every rank keeps one for its control group.

    Meetings are numbered, refused ones too, so that ranks know which of them are the same. Arguments are
    those of `Watch`.
    """

    def meet(self, claim: Claim) -> Agreed:
        """Return as `Agreement.meet`; a claim that may, of a kind on which ranks have agreed, goes ahead.

        It takes for granted that every rank brings the same numbers. A backward of autograd settles its
        calls before it returns.
        """
        self._raise_failure()
        ahead = claim.may_go_ahead and claim.kind in self._seen
        meeting = self._post(claim, ahead=ahead)
        even = [meeting.word[3:]] * len(self._order)
        numbers = even if ahead else self._answer(meeting)
        if isinstance(numbers, BaseException):
            self._raise_failure()
            # A copy: the error that is kept here must not keep the frames, and tensors, of the caller.
            raise copy(numbers)
        assert numbers is not None
        if claim.kind is not None and claim.kind not in self._seen and numbers == even:
            self._seen[claim.kind] = True
        if ahead and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        lengths = tuple([first for first, *_ in numbers])
        return Agreed(meeting.number, lengths, hash((meeting.number, *meeting.word[1:3])), numbers)

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap a pass: after one that fails, its messages are still on their way, and no call may follow."""
        self._raise_failure()
        try:
            yield
        except _StopRecomputationError:  # no error: the checkpoint has recomputed enough
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                # A message was not sent. The thread may know why, if this rank went ahead, or another rank.
                self._answer(self._last, VERDICT_WITHIN)
                with contextlib.suppress(RuntimeError):
                    self._stop(self._failure_told())
            if isinstance(error, Exception) and not isinstance(self._failure, GoneError):
                self._raise_failure(error)
            self._fail(error, "failed in mid-ring")
            raise
        self._raise_failure()  # an abort ends waits on NCCL without an error, and without values

    def settle(self) -> None:
        self._answer(self._last)
        self._raise_failure()

    def _refuse(self, error: BaseException) -> None:
        """Tell the ranks that meet this one that it refuses its call, and why. Waits for nobody."""
        text = f"rank {self._rank} of the ring refused this call: {_text_of(error)}"
        meeting = self._post(Claim({}, error=text))
        with contextlib.suppress(RuntimeError):  # the store may have ended
            self._store.set(f"refusal/{meeting.number}", text)  # this process may end before the others come

    def _post(self, claim: Claim, *, ahead: bool = False) -> Meeting:
        number = self._last.number + 1 if self._last else 1
        self._last = meeting = Meeting(number, claim, word_of(claim, ahead=ahead))
        with self._changed:
            self._queue.append(meeting)
            self._changed.notify_all()
        return meeting

    def _answer(self, meeting: Meeting | None, seconds: float | None = None) -> Answer:
        """Wait for the answer to a meeting, if there is one, or for a failure; None if `seconds` pass."""
        try:
            with self._changed:
                while meeting and not (meeting.answer or self._failure) and self._changed.wait(seconds):
                    pass
                return (meeting and meeting.answer) or self._failure
        except BaseException as error:  # KeyboardInterrupt, or the error of a signal handler
            self._fail(error, "was interrupted while it waited for the others")
            raise

    def _raise_failure(self, cause: Exception | None = None) -> None:
        """Raise why no call may follow, if that is so."""
        if self._failure is not None:
            kind = ValueError if isinstance(self._failure, ValueError) else RuntimeError
            text = "Messages may still be on their way: make the process group anew"
            raise kind(f"{self._failure}. {text}") from cause

    def _fail(self, error: BaseException, how: str) -> None:
        self._stop(RuntimeError(f"rank {self._rank} of the ring {how}: {_text_of(error)}"), tell=True)


def _text_of(error: BaseException) -> str:
    """Return an error with the name of its class."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
