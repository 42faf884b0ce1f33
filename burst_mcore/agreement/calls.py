"""Numbered calls of one ring: all ranks make the same, in the same order, or every rank gets an error.

At the start of a call ranks exchange 40 bytes each: its number, digests of its signature, its rows. Where
these differ, the signatures follow by the store, and the error names ranks and fields. A rank that refuses
its call leaves its error in the store, where waiting ranks look.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.agreement.claims import Signature, differences, digest_of_items
from burst_mcore.agreement.exchange import Gathering

ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""
_REFUSED = (1, 0, 0, 0, 0)
"""The integers of a rank that refused its call."""


class Agreement:
    """The agreements of one ring. Every rank keeps one for each control group.

    Calls are numbered, refused ones too, so that ranks know which of them are the same. A rank that refuses a
    call returns at once. It sends the exchange that it skipped before its next call, so that the ranks stay
    in step: no other collective on the control group may come between the two.

    Args:
        group: gloo, over all ranks of the ring.
        ranks: global ranks in the order of the ring; `rank` is this rank's place among them.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self.group = group
        self._rank, self._size = rank, len(ranks)
        self._exchange = Gathering(
            group, ranks, rank, absent=_REFUSED, look=self._look, fail=self._leave_failure
        )
        self._store = PrefixStore(f"burst_mcore/{group.group_name}", _get_default_store())
        self._call = 0
        self._broken: str | None = None
        self._owed = 0

    def agree(self, signature: Signature) -> int:
        """Return the number of the call once every rank of the ring has come with the same signature.

        Raises:
            ValueError: signatures differ (names each field and who has what), or a rank refused its call.
            RuntimeError: a rank has gone, or did not come within the group's time-out; an earlier call failed
                in mid-ring.
        """
        number, _ = self.meet(signature, {}, 0)
        return number

    def meet(self, signature: Signature, if_even: Signature, rows: int) -> tuple[int, list[int] | None]:
        """Agree as `agree` does; `if_even` must be the same as well, but only if every rank has as many rows.

        Returns:
            The number of the call, and None, or the rows of every rank if they differ.
        """
        self._begin()
        digests = digest_of_items(tuple(signature.items())), digest_of_items(tuple(if_even.items()))
        table = self._exchange.integers((0, self._call, *digests, rows))
        if any(row[0] for row in table):
            raise self._error()
        calls, always, even, lengths = (len({row[column] for row in table}) for column in (1, 2, 3, 4))
        uneven = lengths > 1
        if calls > 1 or always > 1 or (even > 1 and not uneven):
            everything = {"call": str(self._call), **signature, **if_even}
            raise ValueError(f"the ranks of the ring make different calls: {self._differences(everything)}")
        return self._call, [row[4] for row in table] if uneven else None

    def least(self, value: float) -> float:
        """Return the least of all ranks' values. In a call that all have agreed to make."""
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.group)
        return float(shared)

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._call += 1
        self._owed += 1
        self._leave(f"rank {self._rank} of the ring refused this call: {_text_of(error)}")

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Wrap a pass: after one that fails, its messages are still on their way, and no call may follow."""
        try:
            yield
        except BaseException as error:
            self._broken = _text_of(error)
            raise

    def _begin(self) -> None:
        """Number the call, after the exchanges that this rank owes. Refuse it if an earlier one failed."""
        if self._broken is not None:
            error = RuntimeError(
                f"an earlier call failed in mid-ring on this rank, so that messages of it may still be on "
                f"their way: make the process group anew ({self._broken})"
            )
            self.refuse(error)
            raise error
        for _ in range(self._owed):
            self._exchange.stay_in_step()
        self._owed = 0
        self._call += 1

    def _look(self) -> None:
        """Raise the error that a rank has left for this call, if any. The store goes with its process."""
        try:
            left = self._store.check([self._key("error")])
        except RuntimeError as error:
            raise self._exchange.gone(error) from error
        if left:
            raise self._error() from None

    def _leave_failure(self, error: BaseException) -> None:
        """Tell the other ranks why the hub stopped waiting, unless a rank has told them already."""
        if not isinstance(error, ValueError):
            self._leave(str(error) if isinstance(error, RuntimeError) else _text_of(error), gone=True)

    def _leave(self, text: str, *, gone: bool = False) -> None:
        """Leave an error for the other ranks. A call has one: of several, the last is read."""
        self._store.set(self._key("error"), json.dumps([gone, text]))

    def _error(self) -> ValueError | RuntimeError:
        gone, text = json.loads(self._store.get(self._key("error")))
        return RuntimeError(text) if gone else ValueError(text)

    def _differences(self, signature: Signature) -> str:
        """Return the fields that differ. Signatures go through the store: some ranks may not come."""
        self._store.set(self._key(f"signature/{self._rank}"), json.dumps(signature))
        return differences({rank: self._signature(rank) for rank in range(self._size)})

    def _signature(self, rank: int) -> Signature:
        key = self._key(f"signature/{rank}")
        try:
            self._store.wait([key], ANSWER_WITHIN)
        except RuntimeError:
            return {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        signature: Signature = json.loads(self._store.get(key))
        return signature

    def _key(self, topic: str) -> str:
        return f"{topic}/{self._call}"


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
