"""torch.distributed between ranks that are threads: process groups of NCCL and of gloo.

NCCL: what a rank puts on a communicator runs in order, on a stream of that communicator, after what its
current stream has by then. A message completes when both sides are at the head. `Work.wait` makes the current
stream wait, and not the host; the thread waits all the same, since values must have come, and a stream that
waited in vain would hang as well. A communicator is made by all its ranks together. One that is split off
another is made by all ranks of that one. One that a rank aborts ends that rank's waits, without an error and
without values. On gloo the host waits, until the group's time is over.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .clocks import CHECKER, Clock, joined
from .streams import Stream, current_stream, host
from .tensors import launch

IDLE = 0.05
"""Seconds between two looks at whether any thread still works."""
LOOKS = 6
"""Looks in a row at which all threads slept, and nothing had come, before that is a deadlock."""


TIMEOUT = {"gloo": timedelta(minutes=10)}
"""How long the host waits."""


class Deadlock(BaseException):
    """All ranks wait; no handler of the package may take it for a step that failed."""


class Network:
    """What all ranks share: a lock, the groups, and who waits for what."""

    def __init__(self, ranks: int) -> None:
        self.ranks = tuple(range(ranks))
        self.lock = CHECKER.lock
        self.events = 0
        """Messages, collectives and groups that were posted or done."""
        self.waiting: dict[int, _Waiter] = {}
        """By thread."""
        self.broken: BaseException | None = None
        self.store = dist.HashStore()
        self.groups: dict[Any, dict[int, Group]] = {}
        self.calls: Counter[Any] = Counter()
        self.world = {rank: Group(Communicator(self, self.ranks, "world"), rank) for rank in self.ranks}

    def event(self) -> None:
        """Note that something was posted or done, and wake those who waited for it."""
        self.events += 1
        for waiter in self.waiting.values():
            if waiter.holds():
                waiter.called.notify()

    def fail(self, error: BaseException) -> None:
        """End all waits."""
        with self.lock:
            self.broken = self.broken or error
            for waiter in self.waiting.values():
                waiter.called.notify()

    def until(self, holds: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        """Wait until `holds()`; False if that takes longer than `seconds`."""
        me, looks, events, waited = threading.get_native_id(), 0, -1, 0.0
        with self.lock:
            waiter = self.waiting[me] = _Waiter(holds, what, threading.Condition(self.lock))
            try:
                while not holds():
                    if self.broken is not None:
                        raise Deadlock(f"ended while it waited for {what}") from self.broken
                    if seconds is not None and waited >= seconds:
                        return False
                    waiter.called.wait(IDLE)
                    waited += IDLE
                    if next(iter(self.waiting)) != me:  # one looks for all
                        continue
                    looks = looks + 1 if self.events == events and _all_sleep() else 0
                    events = self.events
                    if looks >= LOOKS and not holds():
                        told = "; ".join(sorted({each.what for each in self.waiting.values()}))
                        CHECKER.found("deadlock", told)
                        self.fail(Deadlock(told))
            finally:
                self.waiting.pop(me, None)
        return True


class _Waiter(NamedTuple):
    holds: Callable[[], bool]
    what: str
    called: threading.Condition


def _all_sleep() -> bool:
    """Return whether no other thread of this process runs, or could."""
    me = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if thread != me and state not in "SI":
            return False
    return True


class Communicator:
    """The queues of one group: of each rank, what was posted and is not done."""

    def __init__(self, network: Network, members: tuple[int, ...], kind: str) -> None:
        self.network, self.members, self.kind = network, members, kind
        self.queues: dict[int, deque[Operation]] = {rank: deque() for rank in members}
        self.streams: dict[int, Stream] = {}
        self.started: set[int] = set()
        """The ranks that have used it."""
        self.aborted: set[int] = set()

    def stream(self, rank: int) -> Stream:
        if rank not in self.streams:
            self.streams[rank] = Stream(rank, name=f"{self.kind} {list(self.members)}")
        return self.streams[rank]

    def post(self, operation: Operation) -> Operation:
        with self.network.lock:
            self.queues[operation.rank].append(operation)
            self.network.event()
            self._end_aborted()
            while self._advance():
                self.network.event()
        return operation

    def abort(self, rank: int) -> None:
        """End what a rank has under way, and all that it posts from now on."""
        with self.network.lock:
            self.aborted.add(rank)
            self._end_aborted()
            self.network.event()

    def _end_aborted(self) -> None:
        for rank in self.aborted:
            for operation in self.queues[rank]:
                operation.begin()
                operation.end()
            self.queues[rank].clear()

    def _advance(self) -> bool:
        """Do what can be done with what is at the heads; False if that is nothing."""
        heads = {rank: queue[0] for rank, queue in self.queues.items() if queue}
        for operation in heads.values():
            operation.begin()
        if any(operation.collective for operation in heads.values()):
            return self._collective(heads)
        moved = False
        for rank, operation in heads.items():
            for message in operation.messages:
                partner = heads.get(message.peer)
                if message.sends and not message.done and partner is not None:
                    moved = self._deliver(rank, operation, message, partner) or moved
            if all(message.done for message in operation.messages):
                self.queues[rank].popleft()
                operation.end()
                moved = True
        return moved

    def _deliver(self, rank: int, operation: Operation, message: Message, partner: Operation) -> bool:
        for other in partner.messages:
            if not other.sends and not other.done and other.peer == rank:
                sent, to = message.values, other.tensor.values
                if sent.numel() != to.numel() or sent.dtype != to.dtype:
                    CHECKER.found("message", f"{tuple(sent.shape)} into {tuple(to.shape)} on {self.kind}")
                    self.network.fail(RuntimeError("a message of another size"))
                    return False
                to.copy_(sent.view(to.shape))
                message.done = other.done = True
                operation.knows(partner.before)
                partner.knows(operation.before)
                return True
        return False

    def _collective(self, heads: dict[int, Operation]) -> bool:
        if len(heads) < len(self.members) and not next(iter(heads.values())).rooted:
            return False
        names = {rank: operation.collective for rank, operation in heads.items()}
        if len(set(names.values())) > 1:
            CHECKER.found("order", f"different operations meet on {self.kind}: {names}")
            self.network.fail(Deadlock(f"different operations meet: {names}"))
            return False
        if len(heads) < len(self.members):
            return False
        for operation in heads.values():
            operation.knows(*(other.before for other in heads.values()))
        next(iter(heads.values())).compute(heads)
        for rank, operation in heads.items():
            self.queues[rank].popleft()
            operation.end()
        return True


class Message:
    """A send or a receive."""

    def __init__(self, sends: bool, tensor: Any, peer: int) -> None:
        self.sends, self.tensor, self.peer, self.done = sends, tensor, peer, False
        self.values = tensor.values.clone() if sends else tensor.values


class Operation(dist.Work):
    """What a rank posted as one: a batch of messages, or a collective."""

    def __init__(self, group: Group, messages: Sequence[Message] = (), collective: str = "") -> None:
        super().__init__()
        self.group, self.rank, self.messages, self.collective = group, group.me, list(messages), collective
        self.compute: Callable[[dict[int, Operation]], None] = lambda heads: None
        self.data: Any = None
        self.rooted = False
        self.on_device = False
        self.before: Clock = {}
        self.over = False
        self._born = time.monotonic()
        self._begun = False
        self._posted: Clock = {}
        self._known: Clock = {}
        self._kept: Any = None

    def launched(self, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Put it on the communicator's stream, behind what the current stream has by now."""
        self.on_device = True
        communicator, rank = self.group.communicator, self.rank
        stream = communicator.stream(rank).number
        self._posted = joined(CHECKER.snapshot(current_stream(rank).number), CHECKER.snapshot(host(rank)))
        CHECKER.join(stream, self._posted)
        launch(name, reads, writes, rank=rank, stream=stream)
        self._kept = reads, writes  # as torch keeps them, until somebody has waited

    def begin(self) -> None:
        if self.on_device and not self._begun:
            self._begun = True
            stream = self.group.communicator.stream(self.rank).number
            own = {stream: CHECKER.knows(stream, stream) - 1}  # it is not done itself
            self.before = {**CHECKER.snapshot(stream), **own}

    def knows(self, *clocks: Clock) -> None:
        joined(self._known, *clocks)

    def end(self) -> None:
        if self.on_device:
            CHECKER.join(self.group.communicator.stream(self.rank).number, self._known)
            self._end = CHECKER.snapshot(self.group.communicator.stream(self.rank).number)
        self.over = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = None if timeout is None or not timeout else timeout.total_seconds()
        network, what = self.group.communicator.network, f"rank {self.rank}: {self.collective or 'messages'}"
        network.until(self.is_completed, f"{what} on {self.group.communicator.kind}", seconds)
        if not self.over:
            raise RuntimeError("timed out")
        if self.on_device:
            with CHECKER.lock:
                CHECKER.join(current_stream(self.rank).number, self._end)
        self._kept = None
        return True

    def is_completed(self) -> bool:
        late = not self.on_device and time.monotonic() - self._born > TIMEOUT["gloo"].total_seconds()
        return self.over or late


class Group(dist.ProcessGroup):
    """One rank's end of a communicator."""

    def __init__(self, communicator: Communicator, me: int) -> None:
        super().__init__(communicator.members.index(me), len(communicator.members))
        self.communicator, self.me, self.bound = communicator, me, None
        self.backend, self.gone = communicator.kind.split()[0], False
        self.bound_to: torch.device | None = None

    group_name = property(lambda self: f"{self.communicator.kind} {self.communicator.members}")
    bound_device_id = property(
        lambda self: self.bound_to, lambda self, device: setattr(self, "bound_to", device)
    )

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(minutes=10)))

    def abort(self) -> None:
        self.communicator.abort(self.me)

    def size(self) -> int:
        return len(self.communicator.members)

    def recv(self, *message: Any) -> Any:
        return SimpleNamespace(wait=lambda timeout: None)


NETWORK: list[Network] = []
"""Of the case that runs."""
