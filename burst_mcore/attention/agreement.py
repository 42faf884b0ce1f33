"""All ranks of a ring must make the same calls, in the same order: where they do not, everyone gets an error.

Every call begins by an all-reduce of the hash of its signature, 56 bytes, over the CPU communicator: it goes
ahead of the first hop. Where the hashes differ, the signatures follow through the store and the error names
ranks and fields. A rank that refuses its call leaves word in the store, where the others, waiting, find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.attention.topology import Topology

LOOK_EVERY = timedelta(seconds=1)
"""How often a waiting rank looks for word of a refusal."""
ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""

_LEAST = -(2**62)
"""Below all that is exchanged."""

Signature = dict[str, str]


class Agreement:
    """The agreements of one ring. Every rank keeps one for each control group.

    Calls are numbered, refused ones too, so that ranks know which of them are the same. A refused call waits
    for nobody; its part in the exchange of hashes is made up for at the rank's next call, so that the ring
    stays in step and can go on.
    """

    def __init__(self, topology: Topology) -> None:
        assert topology.communicators is not None
        self._rank, self._size, self._group = topology.rank, topology.size, topology.communicators.control
        self._store = PrefixStore(f"burst_mcore/{self._group.group_name}", _get_default_store())
        self._call = 0
        self._broken: str | None = None
        self._owed = 0
        self._left: list[object] = []
        """Exchanges that nobody waits for any more, kept alive until they end with the group."""

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
            self._left.append(self._exchange(None))
        self._owed = 0
        self._call += 1
        signature = {"call": str(self._call), **signature}
        work, found = self._exchange((_hash(signature), _hash(if_even), rows))
        self._wait(work, found)
        refused, *ends = found.tolist()
        if refused >= 0:
            raise self._refusal(refused)
        differs = [
            largest != -minus_smallest for largest, minus_smallest in zip(ends[::2], ends[1::2], strict=True)
        ]
        if differs[0] or (differs[1] and not differs[2]):
            raise ValueError(
                f"the ranks of the ring make different calls: {self._differences(signature | if_even)}"
            )
        return self._call, self._everyones(rows) if differs[2] else None

    def least(self, value: float) -> float:
        """The least of all ranks' values. In a call that all have agreed to make."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return float(found)

    def _everyones(self, rows: int) -> list[int]:
        found = torch.zeros(self._size, dtype=torch.int64)
        found[self._rank] = rows
        dist.all_reduce(found, group=self._group)
        lengths: list[int] = found.tolist()
        return lengths

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._call += 1
        self._owed += 1
        self._store.set(self._key("refusal", self._rank), f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def ring(self) -> Iterator[None]:
        """Around a pass: one that fails leaves messages behind, which no later call may take for its own."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _exchange(self, mine: tuple[int, ...] | None) -> tuple[dist.Work, torch.Tensor]:
        """Start to find [a rank that refused, then largest and minus the smallest of each of `mine`].

        None: this rank refused. An all-reduce, since gloo's all-gather takes 5 to 9 times as long where ranks
        share cores.
        """
        words = [self._rank, *[_LEAST] * 6] if mine is None else [-1, *(s * x for x in mine for s in (1, -1))]
        found = torch.tensor(words)
        work = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return work, found

    def _wait(self, work: dist.Work, found: torch.Tensor) -> None:
        while not work.is_completed():
            try:
                work.wait(LOOK_EVERY)
            except RuntimeError:  # LOOK_EVERY has passed, or the work failed and is complete
                for rank in range(self._size):
                    if self._store.check([self._key("refusal", rank)]):
                        self._left.append((work, found))
                        raise self._refusal(rank) from None
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"burst_attention on rank {self._rank} of {self._size}: another rank of the ring has gone or "
                f"did not come; look for the first error among the other ranks ({error})"
            ) from error

    def _refusal(self, rank: int) -> ValueError:
        word = self._store.get(self._key("refusal", rank)).decode()
        return ValueError(f"rank {rank} of the ring refused this call: {word}")

    def _differences(self, signature: Signature) -> str:
        """Each field that differs, with who has what. Through the store: it works whoever comes or not."""
        self._store.set(self._key("signature", self._rank), json.dumps(signature))
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
        key = self._key("signature", rank)
        try:
            self._store.wait([key], ANSWER_WITHIN)
        except RuntimeError:
            return {"answer": f"none within {ANSWER_WITHIN.seconds} s"}
        signature: Signature = json.loads(self._store.get(key))
        return signature

    def _key(self, kind: str, rank: int) -> str:
        return f"{kind}/{self._call}/{rank}"


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
    return int.from_bytes(digest, "little")  # 56 bits: it and its negative are above _LEAST
