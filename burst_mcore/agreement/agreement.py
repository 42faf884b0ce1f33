"""`Agreement`, four verbs by which ranks agree, of a rank alone; `Ring`, of the ranks of a ring."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch.utils.checkpoint import _StopRecomputationError

from burst_mcore.agreement.claims import AHEAD, NUMBERS, REFUSES, WAITS, Signature, Word, digest_of
from burst_mcore.agreement.watch import Answer, GoneError, Meeting, Watch

VERDICT_WITHIN = 5.0
"""Seconds that a rank whose ring step failed waits to hear whether the ranks disagreed on the call."""


class Claim(NamedTuple):
    """What a rank brings to a meeting: fields that must be the same on all ranks, and numbers for them."""

    signature: Signature
    numbers: tuple[int, ...] = ()
    if_even: Signature | None = None
    """Fields that must be the same as well, but only if the numbers of all ranks are the same."""
    kind: Hashable = None
    may_go_ahead: bool = False
    """Whether this rank need not wait, once all ranks have met with claims of this kind."""
    of_call: int = 0
    """Of a backward, the number of its forward, which must be the same, too."""
    error: str | None = None
    """Why this rank refuses."""

    def word(self, *, ahead: bool = False) -> Word:
        """Return the claim as integers."""
        how = REFUSES if self.error is not None else AHEAD if ahead else WAITS
        always, if_even = [digest_of(*(x or {}).items()) for x in (self.signature, self.if_even)]
        return [how, always, if_even + self.of_call, *self.numbers, *[0] * (NUMBERS - len(self.numbers))]


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
        answer = even if ahead else self._answer(meeting)
        if isinstance(answer, BaseException):
            self._raise_failure()
            # A copy: the error that is kept here must not keep the frames, and tensors, of the caller.
            raise copy(answer)
        assert answer is not None
        if claim.kind is not None and claim.kind not in self._seen and answer == even:
            self._seen[claim.kind] = True
        if ahead and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        lengths = tuple([first for first, *_ in answer])
        return Agreed(meeting.number, lengths, hash((meeting.number, *meeting.word[1:3])), answer)

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
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        text = f"rank {self._rank} of the ring refused this call: {_text_of(error)}"
        self._leave(f"refusal/{self._calls + 1}", text)
        self._post(Claim({}, error=text))

    def _post(self, claim: Claim, *, ahead: bool = False) -> Meeting:
        self._calls += 1
        fields = {"of call": str(claim.of_call), **claim.signature, **(claim.if_even or {})}
        self._last = meeting = Meeting(self._calls, claim.word(ahead=ahead), fields)
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
        failure = self._failure
        if failure is not None:
            text = f"{failure}. Messages may still be on their way: make the process group anew"
            raise (ValueError if isinstance(failure, ValueError) else RuntimeError)(text) from cause

    def _fail(self, error: BaseException, how: str) -> None:
        self._stop(RuntimeError(f"rank {self._rank} of the ring {how}: {_text_of(error)}"), tell=True)


def _text_of(error: BaseException) -> str:
    """Return an error with the name of its class."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
