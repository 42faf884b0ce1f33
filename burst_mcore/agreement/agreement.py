"""`Agreement`, four verbs by which ranks agree: `agreement_over` a process group, and `Ring`, over a ring."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from burst_mcore.agreement.claims import AHEAD, REFUSES, WAITS, Claim, Exchange, OthersError, numbers_of
from burst_mcore.agreement.watch import Meeting, Watch
from burst_mcore.words import digest

T = TypeVar("T")
NUMBERS = 6
"""Numbers of a word, which has 64 bytes."""
VERDICT_WITHIN = 5.0
"""Seconds that a rank whose ring step failed waits to hear whether the ranks disagreed on the call."""


def word_of(claim: Claim, *, ahead: bool = False) -> list[int]:
    """Return a claim as integers: how a rank comes to a meeting, a digest of its fields, and its numbers."""
    how = REFUSES if claim.error is not None else AHEAD if ahead else WAITS
    fields = digest_of(*claim.signature.items()) + claim.of_call
    return [how, fields, *claim.numbers, *[0] * (NUMBERS - len(claim.numbers))]


@lru_cache(maxsize=1024)  # the calls of a layer have the same signature in every step
def digest_of(*items: tuple[str, str]) -> int:
    """Return 56 bits that tell signatures apart, from their items; the order of these does not count."""
    return int(digest(json.dumps(dict(items), sort_keys=True))[:14], 16)


class Agreed(NamedTuple):
    """A meeting in which the ranks agree, or from which this rank went ahead, to be looked at later."""

    number: int
    numbers: Sequence[Sequence[int]]
    """The numbers of every rank, filled up with zeros."""
    label: int = 0
    """The same on all ranks of the meeting, and another for nearly every other meeting."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The first number of every rank: its tokens."""
        return tuple([first for first, *_ in self.numbers])


class Agreement:
    """The agreement of ranks that make the same calls in the same order, by an exchange of integers.

    A call has work that this rank does by itself, a meeting, and perhaps messages. Whatever differs or fails
    on a rank, all get an error, and none waits in vain.
    """

    def __init__(self, exchange: Exchange, ranks: Sequence[int], rank: int) -> None:
        self._exchange, self._ranks, self._rank = exchange, ranks, rank

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Wrap work before a meeting: an error of it is told to the ranks that meet, or will."""
        try:
            yield
        except BaseException as error:
            self._refuse(error)
            raise

    def meet(self, claim: Claim) -> Agreed:
        """Return once every rank has come with the same claim; on a ring, perhaps before.

        ValueError, on all ranks: claims differ, or a rank refuses. RuntimeError: a rank is gone, or too late.
        """
        words = self._exchange(word_of(claim))
        return Agreed(0, numbers_of(words, claim, self._exchange, self._ranks))

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap the messages of a call, and work that follows: after an error there no call may follow."""
        yield

    def settle(self) -> None:
        """Wait until every meeting from which this rank went ahead has been looked at; raise its error."""

    def _refuse(self, error: BaseException) -> None:
        """Take part in the meeting of the other ranks with an error."""
        if isinstance(error, Exception):  # an interrupt waits for nobody
            text = str(error) or type(error).__name__
            text = text if isinstance(error, OthersError) else f"rank {self._rank}: {text}"
            with contextlib.suppress(OthersError):
                self.meet(Claim({}, error=text))


ALONE = Agreement(lambda row: [[*row]], [0], 0)


class Ring(Watch, Agreement):
    """The agreement of the ranks of a ring, over its control group.

    With a kind of claim on which all have agreed a rank takes for granted that they do again: it goes ahead.
    """

    def meet(self, claim: Claim) -> Agreed:
        self._raise_failure()
        ahead = claim.kind in self._seen
        meeting = self._post(claim, ahead=ahead)
        even = [meeting.word[2:]] * len(self._order)
        numbers = even if ahead else self._answer(meeting)
        if isinstance(numbers, BaseException):
            self._raise_failure()
            raise OthersError(*numbers.args)  # a new error: a kept one would keep the caller's frames
        if claim.kind is not None and not ahead and numbers == even:
            self._seen[claim.kind] = True
        if ahead and torch._C._current_graph_task_id() != -1:  # at the end of autograd's backward
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)
        return Agreed(meeting.number, numbers, hash((meeting.number, meeting.word[1])))

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
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
            if isinstance(error, Exception):
                self._raise_failure(error)
            self._stop(RuntimeError(self._text_of(error, "failed in mid-ring")), tell=True)
            raise
        self._raise_failure()  # an abort ends waits on NCCL without an error, and without values

    def settle(self) -> None:
        self._answer(self._last)
        self._raise_failure()

    def _refuse(self, error: BaseException) -> None:
        """Tell the ranks that meet this one that it refuses its call, and why. Waits for nobody."""
        text = self._text_of(error, "refused this call")
        meeting = self._post(Claim({}, error=text))
        with contextlib.suppress(RuntimeError):  # the store may have ended
            self._store.set(f"refusal/{meeting.number}", text)  # this process may end before the others come

    def _post(self, claim: Claim, *, ahead: bool = False) -> Meeting:
        self._last = meeting = Meeting(self._last.number + 1, claim, word_of(claim, ahead=ahead))
        with self._changed:
            self._queue.append(meeting)
            self._changed.notify_all()
        return meeting

    def _answer(self, meeting: Meeting, seconds: float | None = None) -> Any:
        """Wait for the answer to a meeting, or for a failure; None if `seconds` pass."""
        try:
            with self._changed:
                while not (meeting.answer or self._failure) and self._changed.wait(seconds):
                    pass
                return meeting.answer or self._failure
        except BaseException as error:  # KeyboardInterrupt, or the error of a signal handler
            text = self._text_of(error, "was interrupted while it waited for the others")
            self._stop(RuntimeError(text), tell=True)
            raise

    def _raise_failure(self, cause: Exception | None = None) -> None:
        """Raise why no call may follow, if that is so."""
        if self._failure is not None:
            kind = ValueError if isinstance(self._failure, ValueError) else RuntimeError
            raise kind(
                f"{self._failure}. Messages may be on their way: make the process group anew"
            ) from cause

    def _text_of(self, error: BaseException, how: str) -> str:
        text = f"rank {self._rank} of the ring {how}: {type(error).__name__}: {error}"
        return text.removesuffix(": ")


def agreement_over(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Agreement:
    """Return the agreement of the ranks of a caller's group; None: of this rank alone. device: of NCCL."""
    if group is None or group.size() == 1:
        return ALONE
    exchange = partial(integers_of, group, device=device)
    return Agreement(exchange, dist.get_process_group_ranks(group), dist.get_rank())


def on_all_ranks(do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return `do()`, if it succeeds on every rank of a group, by default of all. Collective over them.

    Else a rank raises its own error, or OthersError. `do` may be collective if it fails on all ranks or none.
    """
    agreement = agreement_over(group or dist.group.WORLD)
    with agreement.refusing():
        result = do()
    agreement.meet(Claim({}))
    return result


def check_equal(name: str, value: Any) -> None:
    """Raise OthersError on all ranks if their values of this name print differently. Collective."""
    agreement_over(dist.group.WORLD).meet(Claim({name: str(value)}))


def integers_of(
    group: dist.ProcessGroup, mine: Sequence[int], device: torch.device | None = None
) -> list[list[int]]:
    """Return the integers of every rank of a group, by rank, as many of each. Collective; device: of NCCL."""
    place = device or "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    table = torch.empty(dist.get_world_size(group), len(mine), dtype=torch.int64, device=place)
    dist.all_gather(list(table.unbind()), torch.tensor([*mine], device=place), group=group)
    return table.tolist()
