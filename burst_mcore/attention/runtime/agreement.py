"""All ranks of a ring must make the same calls, in the same order: where they do not, everyone gets an error.

Every call begins with a gather and a broadcast over the CPU communicator, ahead of the first hop: 32 bytes of
each rank, hashes of its signature, go to all. Where the hashes differ, the signatures follow by the store and
the error names ranks and fields. A rank that refuses its call leaves word in the store, where the others,
waiting, find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.attention.runtime.topology import Topology

LOOK_EVERY = timedelta(seconds=1)
"""How often a waiting rank looks for word of a refusal."""
ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""
_REFUSED = (1, 0, 0, 0)
"""What a rank brings to the exchange of a call that it refused."""

Signature = dict[str, str]


class Agreement:
    """The agreements of one ring. Every rank keeps one for each control group.

    Calls are numbered, refused ones too, so that ranks know which of them are the same. A rank that refuses a
    call returns at once. It sends the exchange that it skipped before its next call, so that the ranks stay
    in step: no other collective on the control group may come between the two.
    """

    def __init__(self, topology: Topology) -> None:
        assert topology.communicators is not None
        self._rank, self._size, self._group = topology.rank, topology.size, topology.communicators.control
        self._order = [dist.get_group_rank(self._group, rank) for rank in topology.communicators.ranks]
        """Where the ranks of the ring stand in the group."""
        self._store = PrefixStore(f"burst_mcore/{self._group.group_name}", _get_default_store())
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
        """As `agree`; `if_even` must be the same as well, but only if every rank has as many rows.

        Returns:
            The number of the call, and None, or the rows of every rank if they differ.
        """
        if self._broken is not None:
            error = RuntimeError(
                f"an earlier call failed in mid-ring on this rank, so that messages of it may still be on "
                f"their way: make the process group anew ({self._broken})"
            )
            self.refuse(error)
            raise error
        for _ in range(self._owed):
            self._stay_in_step()
        self._owed = 0
        self._call += 1
        signature = {"call": str(self._call), **signature}
        refused, ours, if_evens, lengths = self._everyones(0, _hash(signature), _hash(if_even), rows)
        if any(refused):
            raise self._word()
        uneven = len(set(lengths)) > 1
        if len(set(ours)) > 1 or (len(set(if_evens)) > 1 and not uneven):
            raise ValueError(
                f"the ranks of the ring make different calls: {self._differences(signature | if_even)}"
            )
        return self._call, lengths if uneven else None

    def least(self, value: float) -> float:
        """The least of all ranks' values. In a call that all have agreed to make."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return float(found)

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._call += 1
        self._owed += 1
        self._leave_word(f"rank {self._rank} of the ring refused this call: {_said(error)}")

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Around a pass: one that fails leaves messages behind, which no later call may take for its own."""
        try:
            yield
        except BaseException as error:
            self._broken = _said(error)
            raise

    def _everyones(self, *mine: int) -> list[list[int]]:
        """What every rank has brought, column by column, by way of the group's first.

        An all-reduce takes 2 (G - 1) messages on gloo, one after another.
        """
        gathering, table = self._gather(mine)
        try:
            if self._order[self._rank] == 0:
                self._wait(gathering)
        except BaseException as error:  # the others have begun a broadcast
            if not isinstance(error, ValueError):
                self._leave_word(str(error) if isinstance(error, RuntimeError) else _said(error), gone=True)
            self._broadcast(self._refused())
            raise
        self._wait(gathering, self._broadcast(table))
        found: list[list[int]] = table[self._order].T.tolist()
        return found

    def _stay_in_step(self) -> None:
        """This rank's part in an exchange whose call it refused; the others may have left it by now."""
        self._gather(_REFUSED)
        self._broadcast(self._refused())

    def _gather(self, mine: Sequence[int]) -> tuple[dist.Work, Tensor]:
        table = torch.empty(self._size, len(mine), dtype=torch.int64)
        rows = list(table.unbind()) if self._order[self._rank] == 0 else None
        work = dist.gather(torch.tensor(mine), rows, group=self._group, group_dst=0, async_op=True)
        assert isinstance(work, dist.Work)
        return work, table

    def _broadcast(self, table: Tensor) -> dist.Work:
        work = dist.broadcast(table, group=self._group, group_src=0, async_op=True)
        assert isinstance(work, dist.Work)
        return work

    def _refused(self) -> Tensor:
        """A table of its own: a gather that nobody waits for may still write into its table."""
        return torch.tensor([_REFUSED] * self._size)

    def _wait(self, *works: dist.Work) -> None:
        """Until the last is complete, a rank has left word, or one has failed."""
        while not works[-1].is_completed() and not any(map(_failed, works)):
            try:
                works[-1].wait(LOOK_EVERY)
            except RuntimeError:  # LOOK_EVERY has passed, or the work failed and is complete
                if self._is_said():
                    raise self._word() from None
        try:
            for work in works:
                if work.is_completed():  # what waits for a rank that is gone may never be
                    work.wait()
        except RuntimeError as error:
            raise self._gone(error) from error

    def _is_said(self) -> bool:
        """Whether a rank has left word. The store goes with the process that keeps it."""
        try:
            return bool(self._store.check([self._key("word")]))
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"burst_attention on rank {self._rank} of {self._size}: another rank of the ring has gone or "
            f"did not come to this call, before its first hop; look for the first error among the other "
            f"ranks ({error})"
        )

    def _leave_word(self, text: str, *, gone: bool = False) -> None:
        """One word a call: of ranks that leave one each, the last is heard."""
        self._store.set(self._key("word"), json.dumps([gone, text]))

    def _word(self) -> ValueError | RuntimeError:
        gone, text = json.loads(self._store.get(self._key("word")))
        return RuntimeError(text) if gone else ValueError(text)

    def _differences(self, signature: Signature) -> str:
        """Each field that differs, with who has what. Through the store: it works whoever comes or not."""
        self._store.set(self._key(f"signature/{self._rank}"), json.dumps(signature))
        signatures = [self._signature(rank) for rank in range(self._size)]
        differences = []
        for field in dict.fromkeys(field for each in signatures for field in each):
            ranks_by_value: dict[str, list[int]] = defaultdict(list)
            for rank, each in enumerate(signatures):
                ranks_by_value[each.get(field, "nothing")].append(rank)
            if len(ranks_by_value) > 1:
                who = ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_by_value.items())
                differences.append(f"{field}: {who}")
        return "; ".join(differences)

    def _signature(self, rank: int) -> Signature:
        key = self._key(f"signature/{rank}")
        try:
            self._store.wait([key], ANSWER_WITHIN)
        except RuntimeError:
            return {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        signature: Signature = json.loads(self._store.get(key))
        return signature

    def _key(self, what: str) -> str:
        return f"{what}/{self._call}"


_KNOWN: dict[str, Agreement] = {}


def agreement(topology: Topology) -> Agreement | None:
    """The agreement of a ring; None where there is nobody to agree with."""
    if topology.communicators is None:
        return None
    group = topology.communicators.control
    if group.group_name not in _KNOWN or _KNOWN[group.group_name]._group is not group:
        _KNOWN[group.group_name] = Agreement(topology)
    return _KNOWN[group.group_name]


def _hash(signature: Signature) -> int:
    digest = hashlib.blake2b(json.dumps(signature, sort_keys=True).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(work: dist.Work) -> bool:
    """Whether it is complete, by an error."""
    try:
        if work.is_completed():
            work.wait()
    except RuntimeError:
        return True
    return False
