"""The attention calls of one checkpointed call: its forward records them, its recomputation replays them.

Each checkpointed call has its own `Record` of numbered calls. So microbatches in flight cannot mix, whatever
the order of their backwards, nor can forwards without a backward.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.replay import CallId, RecomputeError, SavedSuffix, entered
from burst_mcore.checkpointing.offload import OnDevice, SavedResults
from burst_mcore.wrap import while_set


@dataclass(frozen=True)
class Policy(ABC):
    """The saved part of attention's O and LSE; the rest of a checkpointed layer is recomputed."""

    @property
    def keeps_nothing(self) -> bool:
        """Whether this is plain checkpointing, in which calls are only compared."""
        return self.share(1) == (0.0, False)

    @abstractmethod
    def share(self, size: int) -> tuple[float, bool]:
        """Return (share of a call to save, whether it is an upper limit); size: bytes of its O and LSE."""

    def hold(self, suffix: SavedSuffix) -> SavedResults:
        """Save the results of a call until the recomputation takes them."""
        results = OnDevice(suffix)
        self.watch(results, suffix)
        return results

    def watch(self, results: SavedResults, suffix: SavedSuffix) -> None:  # noqa: B027  # few policies count
        """Count saved results for as long as `results` lives."""

    def contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[object], contextlib.AbstractContextManager[object]]:
        """Return a `context_fn` for non-reentrant torch.utils.checkpoint, which libraries take as an option.

        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy.contexts})
        """
        if not is_recorded(self):
            return contextlib.nullcontext(), contextlib.nullcontext()
        record = Record(self, "a checkpointed call")
        return record.forward(), _Again(record)


class _Again(contextlib.ExitStack):
    """The context of recomputations, entered once for each backward."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __enter__(self) -> Self:
        self.enter_context(self._record.recomputation())
        return self


class Record:
    """The attention calls of one checkpointed call, and their saved results."""

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy, self.name = policy, name
        self.keeps = not policy.keeps_nothing
        self.call_ids: list[CallId] = []
        self.held: list[SavedResults | None] = []
        self.repeated = 0
        """The calls of the recomputation so far."""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap the forward: record the calls in it."""
        with while_set(entered, recordings=(*entered.recordings, self), in_checkpoint=True):
            yield

    def share(self, call_id: CallId) -> tuple[float, bool]:
        return self.policy.share(call_id.bytes)

    def record(self, call_id: CallId, suffix: SavedSuffix) -> None:
        self.call_ids.append(call_id)
        self.held.append(self.policy.hold(suffix) if self.keeps else None)

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Wrap the recomputation. Raises RecomputeError if it makes fewer calls than the forward."""
        self.repeated = 0
        with while_set(entered, replays=(*entered.replays, self), in_checkpoint=True):
            yield
        if self.repeated < len(self.call_ids):
            call_id = self.call_ids[self.repeated]
            error = RecomputeError(
                f"the recomputation of {self.name} made {self.repeated} calls of burst_attention, but its "
                f"forward made {len(self.call_ids)}; the next was {call_id}: a checkpointed function must do "
                f"the same both times"
            )
            with agreement_of(call_id.topology).refusing():  # the other ranks may wait for the call
                raise error

    def replay(self, call_id: CallId) -> SavedSuffix | None:
        number = self.repeated
        self.repeated += 1
        if number >= len(self.call_ids):
            raise RecomputeError(
                f"call {number + 1} of burst_attention in the recomputation of {self.name}, {call_id}, has "
                f"no record: its forward made {len(self.call_ids)}; a checkpointed function must do the "
                f"same both times"
            )
        if call_id != self.call_ids[number]:
            raise RecomputeError(
                f"call {number + 1} of burst_attention in the recomputation of {self.name}, {call_id}, is "
                f"another than in its forward: {call_id.unlike(self.call_ids[number])}"
            )
        results, self.held[number] = self.held[number], None
        try:
            return None if results is None else results.take()
        except RecomputeError as error:
            raise RecomputeError(f"{call_id} in {self.name}: {error}") from error


def is_recorded(policy: Policy) -> bool:
    """Return whether a forward that begins now is recorded: a recomputation may follow, and differ."""
    same_graph = policy.keeps_nothing and torch.compiler.is_compiling()  # of forward and recomputation
    return torch.is_grad_enabled() and not same_graph


def in_backward() -> bool:
    """Return whether this thread is in a backward, where recomputations take place."""
    return bool(torch._C._current_graph_task_id() != -1)
