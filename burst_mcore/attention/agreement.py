"""All ranks of a ring must make the same call: where they do not, everyone gets an error and nobody hangs.

Every call begins by exchanging the hash of its signature, 8 bytes a rank, over the CPU communicator. Where
the hashes differ, the signatures follow through the store and the error names ranks and fields. A rank that
refuses its call leaves word in the store, where the others, waiting for its hash, find it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from burst_mcore.attention.topology import Topology

LOOK_EVERY = timedelta(seconds=1)
"""How often a waiting rank looks for word of a refusal."""
ANSWER_WITHIN = timedelta(seconds=20)
"""How long ranks that disagree wait for each other's signatures."""

Signature = dict[str, str]


class Agreement:
    """The agreements of one ring. Every rank keeps one for each control group."""

    def __init__(self, topology: Topology) -> None:
        assert topology.control_group is not None
        self._rank, self._size, self._group = topology.rank, topology.size, topology.control_group
        self._store = PrefixStore(f"burst_mcore/{self._group.group_name}", _get_default_store())
        self._calls = 0
        self._refused = False

    def agree(self, signature: Signature) -> None:
        """Return once every rank of the ring has come with the same signature.

        Raises:
            ValueError: signatures differ (names each field and who has what), or a rank refused its call.
            RuntimeError: a rank has gone, or did not come within the group's time-out.
        """
        if self._refused:  # the refusal was of an earlier call, which this one takes the place of
            self._store.set(self._key("refusal", self._rank), "")
            self._refused = False
        mine = torch.tensor([_hash(signature)])
        hashes = [torch.empty_like(mine) for _ in range(self._size)]
        self._wait(dist.all_gather(hashes, mine, group=self._group, async_op=True))
        if any(not torch.equal(mine, other) for other in hashes):
            raise ValueError(f"the ranks of the ring make different calls: {self._differences(signature)}")
        self._calls += 1

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that may wait for this one that it refuses its call, and why. Waits for nobody."""
        self._store.set(self._key("refusal", self._rank), str(error))
        self._refused = True

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        while not work.is_completed():
            try:
                work.wait(LOOK_EVERY)
            except RuntimeError:  # LOOK_EVERY has passed, or the work failed and is complete
                self._look_for_refusals()
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"burst_attention on rank {self._rank} of {self._size}: another rank of the ring has gone or "
                f"did not come; look for the first error among the other ranks ({error})"
            ) from error

    def _look_for_refusals(self) -> None:
        for rank in range(self._size):
            key = self._key("refusal", rank)
            if self._store.check([key]) and (word := self._store.get(key).decode()):
                raise ValueError(f"rank {rank} of the ring refused this call: {word}") from None

    def _differences(self, signature: Signature) -> str:
        """Each field that differs, with who has what. Through the store: it works whoever comes or not."""
        self._store.set(self._key("signature", self._rank), json.dumps(signature))
        signatures = [self._signature(rank) for rank in range(self._size)]
        self._calls += 1
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
        return f"{kind}/{self._calls}/{rank}"


_KNOWN: dict[str, Agreement] = {}


def agreement(topology: Topology) -> Agreement | None:
    """The agreement of a ring; None where there is nobody to agree with."""
    group = topology.control_group
    if group is None:
        return None
    if group.group_name not in _KNOWN or _KNOWN[group.group_name]._group is not group:
        _KNOWN[group.group_name] = Agreement(topology)
    return _KNOWN[group.group_name]


def _hash(signature: Signature) -> int:
    digest = hashlib.blake2b(json.dumps(signature, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
